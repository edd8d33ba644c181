"""Prompts in real processes: steps that reach a Tra(), stops inside expressions, questions, assignments."""

import random
import socket
import sys
import threading

import pytest
from debugger_site import ROOT, poll

sys.path.insert(0, str(ROOT / "tests" / "debugger" / "programs"))
FLAVOURS = pytest.mark.parametrize("flavour", ["pdb", "pdbpp"])


def await_end(site, ranks, words):
    for number, rank in enumerate(ranks):
        site.await_exit(rank)
        assert words in site.read(f"rank{number}")
    assert site.sockets() == []


@FLAVOURS
def test_steps_over_and_onto_lines_that_stop(site, flavour):
    ranks = site.start_ranks(2, "loops.py", env={"MPDB_PDB": flavour})
    site.await_ranks(2)
    text = site.ask(*["next"] * 8)
    assert "bdb.py" not in text
    places = [line.split("loops.py")[1].split(")")[0] for line in text.splitlines() if "loops.py(" in line]
    assert places == ["(13", "(13", "(18", "(19", "(20", "(13", "(13", "(18"]
    site.ask(*["c", "wait 2 30"] * 2, "c")
    await_end(site, ranks, "total 9")


def test_a_breakpoint_before_a_function_that_stops(site):
    ranks = site.start_ranks(1, "loops.py")
    site.await_ranks(1)
    site.ask("@0 b 12", "c")
    site.await_ranks(1)
    assert "loops.py:12" in site.ask("ls")
    site.ask("@0 clear 1", *["c", "wait 1 30"] * 5, "c")
    await_end(site, ranks, "total 9")


@FLAVOURS
def test_a_stop_inside_an_expression_has_its_own_prompt(site, flavour):
    ranks = site.start_ranks(2, "loops.py", env={"MPDB_PDB": flavour})
    site.await_ranks(2)
    assert "loops.py(13)step()" in site.ask("@all p step(20)")
    assert "in step" in site.ask("ls")
    assert site.ask("diff doubled") == "ranks 0-1: 40 (equal on all)\n"
    assert "--Return--" in site.ask("next")
    assert site.ask("c") == "ranks 0-1: 41\n"
    assert "loop 0" in site.ask("ls")
    assert site.ask("diff number") == "ranks 0-1: 0 (equal on all)\n"
    site.ask("@all p step(30)")
    assert "BdbQuit" in site.ask("@all q")
    assert site.ask("diff number, step(1)") == "ranks 0-1: (0, 3) (equal on all)\n"
    site.ask(*["c", "wait 2 30"] * 5, "c")
    await_end(site, ranks, "total 9")


@FLAVOURS
def test_a_step_out_of_an_expression_ends_at_the_prompt_behind_an_error(site, flavour):
    """At that point Python traces the debugger's own code: such a prompt is in no trace function."""
    (rank,) = site.start_ranks(1, "post_mortem.py", env={"MPDB_PDB": flavour})
    site.await_ranks(1)
    assert "post_mortem.py(12)stops()" in site.ask("@0 p stops(20)")
    steps = site.ask("next", "step", "step")
    assert "post_mortem.py(12)stops()->21" in steps
    assert "signal.py" not in steps
    assert "divide: return value" in site.ask("@0 where")
    site.ask("@0 p stops(30)", "@0 q")
    site.ask("c")
    site.await_exit(rank)
    assert site.read("rank0") == "handled\n"


@FLAVOURS
@pytest.mark.parametrize("command", ["watch value changes", "p step(1)", "p Tra()", "break 20", "where"])
def test_no_command_undoes_an_assignment(site, flavour, command):
    (rank,) = site.start_ranks(1, "assigned.py", env={"MPDB_PDB": flavour})
    site.await_ranks(1)
    site.ask("@0 value = 500", f"@0 {command}")
    nested = "step" in command or "Tra" in command
    if nested:
        site.ask("c", "wait 1 30")
    assert site.ask("@0 p value") == "rank 0: 500\n"
    site.ask("@0 clear 1", "unwatch", "c")
    site.await_exit(rank)
    assert site.read("rank0") == "total 501\n"


@FLAVOURS
def test_diff_keeps_what_was_assigned_at_the_prompt(site, flavour):
    ranks = site.start_ranks(1, "work.py", env={"MPDB_PDB": flavour})
    site.await_ranks(1)
    answers = site.ask("@0 value = 500", "@0 p value", "diff value", "@0 p value").splitlines()
    assert answers[1:] == ["rank 0: 500"] * 3
    site.ask("c")
    site.await_exit(ranks[0])
    assert "total 1002" in site.read("rank0")


def test_questions_are_answered_from_the_console(site):
    ranks = site.start_ranks(2, "work.py", env={"MPDB_IPYTHON": "0"})
    site.await_ranks(2)
    site.ask("@all b 19")
    assert "Clear all breaks?" in site.ask("@all clear")
    refused = site.run_console("c")
    assert "answer with @" in refused.stdout
    assert "interrupted" in site.ask("interrupt")
    assert site.ask("@all p value > 5").splitlines() == ["rank 0: False", "rank 1: True"]
    assert "Clear all breaks?" in site.ask("@all clear")
    assert "Deleted breakpoint" in site.ask("@all y")
    assert ">>> " in site.ask("@all interact")
    assert "1000" in site.ask("@0 value + 1000")
    site.ask("@all EOF")
    assert site.ask("c") == "ranks 0-1: runs on\n"
    for rank in ranks:
        site.await_exit(rank)


def test_exit_codes_and_the_race_after_continue(site):
    assert site.run_console("ls").returncode == 1
    assert site.run_console("jobs").returncode == 0
    done = site.run_console("ls", options=["--tcp", "nonsense"])
    assert done.returncode == 2
    assert "expected HOST:PORT" in done.stderr
    ranks = site.start_ranks(1, "loops.py")
    site.await_ranks(1)
    for _ in range(5):
        assert site.ask("c", "wait 1 30", "diff 1").endswith("rank 0: 1\n")
    site.ask("c")
    await_end(site, ranks, "total 9")


def test_the_terminals_size_reaches_the_rank(site):
    (rank,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    wide, narrow = ({"COLUMNS": number, "LINES": "45"} for number in ("123", "60"))
    assert len(site.ask("@0 pp list(range(25))", env=wide).splitlines()) == 1
    assert len(site.ask("@0 pp list(range(25))", env=narrow).splitlines()) > 10
    console = site.open_console()
    console.sendline("attach 0")
    console.expect_exact("(Pdb++) ")
    console.sendline("pp list(range(45))")
    console.expect_exact("43, 44]")
    assert max(len(line) for line in console.before.splitlines()) > 100
    console.sendline("c")
    console.expect_exact("has exited")
    site.await_exit(rank)
    assert "\x1b[2J" not in site.ask("jobs")


def test_a_removed_socket_file_comes_back(site):
    (rank,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    (name,) = site.sockets()
    (site.runtime / name).unlink()
    poll(site.sockets, "the socket file to come back")
    assert site.ask("diff value") == "rank 0: 0\n"
    site.ask("c")
    site.await_exit(rank)


def test_a_flood_on_tcp_does_not_keep_the_user_out(site):
    token = site.home / "token"
    assert site.run_console(options=["--make-token", token]).returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site.start_python("tcp.py", f"127.0.0.1:{port}", env={"MPDB_TOKEN_FILE": str(token)})
    poll(site.sockets, "the rank to stop")
    over = threading.Event()

    def flood():
        held = []
        while not over.is_set():
            try:
                held.append(socket.create_connection(("127.0.0.1", port), 5))
                if len(held) > 200:
                    held.pop(0).close()
            except OSError:
                over.wait(0.01)
        for connection in held:
            connection.close()

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        env = {"MPDB_TOKEN_FILE": str(token), "MPDB_DIR": str(site.home / "elsewhere")}
        done = site.run_console("diff 1 + 1", options=["--tcp", f"127.0.0.1:{port}"], env=env)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert ": 2" in done.stdout, done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_random_commands_over_real_processes(site, seed):
    """Run fewer of the state machine's sequences, in the main thread of separate processes."""
    chance = random.Random(seed)
    import maze

    ops = [chance.choice(sorted(maze.OPS)) for _ in range(3)]
    flavour = chance.choice(["pdb", "pdbpp"])
    rank = site.start_python(
        "maze.py", *ops, env={"MPDB_JOB": site.job, "MPDB_PDB": flavour, "MPDB_TERMINAL": "0"}
    )
    commands = [
        "next",
        "step",
        "until",
        "return",
        "c",
        "where",
        "diff 1",
        "@all p inner(1)",
        "@all up",
        "@all y",
    ]
    for _ in range(12):
        poll(lambda: rank.poll() is not None or site.sockets(), "the rank to stop or to end")
        if rank.poll() is not None:
            break
        site.run_console(chance.choice(commands), options=["--deadline", "2"])
    while rank.poll() is None:
        if site.sockets():
            site.run_console("@all EOF", "@all clear 1 2 3", "c", options=["--deadline", "2"])
    site.await_exit(rank)
    expected = maze_result(site, ops)
    assert site.read() == expected


def maze_result(site, ops):
    """Return the output of the maze without a debugger."""
    plain = site.start_python("maze.py", *ops, env={"MPDB_DISABLE": "1"}, name="plain")
    site.await_exit(plain)
    return site.read("plain")


def test_interact_is_ipython_where_it_is_installed(site):
    pytest.importorskip("IPython")
    (rank,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    assert "In [1]:" in site.ask("@0 interact")
    assert "value" in site.ask("@0 %who")
    assert "Out[2]: 8" in site.ask("@0 value + 8")
    assert "   ...:" in site.ask("@0 for number in range(2):")
    assert "In [4]:" in site.ask("@0     print('cell', number)", "@0 ")
    assert "ZeroDivisionError" in site.ask("@0 1 / 0")
    assert "(Pdb" not in site.ask("@0 import __main__; __main__.work")
    site.ask("@0 exit")
    assert (
        site.ask("@0 p 'Shell' in str(type(__import__('builtins').__dict__.get('get_ipython')))")
        == "rank 0: False\n"
    )
    assert site.ask("@0 p __import__('sys').modules['__main__'].work is work") == "rank 0: True\n"
    assert site.ask("c") == "rank 0: runs on\n"
    site.await_exit(rank)


def test_interact_is_pythons_own_where_ipython_is_not_wanted(site):
    (rank,) = site.start_ranks(1, "work.py", env={"MPDB_IPYTHON": "0"})
    site.await_ranks(1)
    assert ">>>" in site.ask("@0 interact")
    assert "18" in site.ask("@0 value + 18")
    site.ask("@0 EOF", "c")
    site.await_exit(rank)
