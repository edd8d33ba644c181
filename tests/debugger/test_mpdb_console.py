"""The console with real stopped ranks: asking, grouping, stepping, attaching, leaving."""

import os
import re
import signal
import sys
import threading

import pytest
from debugger_site import COLOR, poll

from multiprocessing_pdb.console.terminal import Terminal, warn
from multiprocessing_pdb.rank.streams import CommandOutput


def test_all_ranks_answer_together(site):
    ranks = site.start_ranks(3, "work.py")
    site.await_ranks(3)
    table = site.ask("ls")
    assert [line.split()[0] for line in table.splitlines()] == ["rank", "0", "1", "2"]
    assert "work.py:17" in table
    assert "at work" in table
    assert site.ask("diff special").splitlines() == ["ranks 0, 2: 'even'", "rank 1: 'odd'"]
    assert site.ask("diff 1 + 1") == "ranks 0-2: 2 (equal on all)\n"
    assert site.ask("@1: p value").splitlines() == ["rank 1: 10", "rank 2: 20"]
    assert "*** NameError" in site.ask("@0 p nothing")
    where = site.ask("where")
    assert where.startswith("ranks 0-2:")
    assert "work: total = value + 1" in where
    assert site.ask("c") == "ranks 0-2: runs on\n"
    for rank, process in enumerate(ranks):
        site.await_exit(process)
        assert f"total {(rank * 10 + 1) * 2}" in site.read(f"rank{rank}")
    assert site.sockets() == []


def test_steps_are_in_lockstep(site):
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    stepped = site.ask("next")
    assert stepped.startswith("ranks 0-1:")
    assert "work.py(18)work()" in stepped
    assert site.ask("diff total").splitlines() == ["rank 0: 1", "rank 1: 11"]
    assert "work.py(19)" in site.ask("@1 next")
    assert site.ask("diff total").splitlines() == ["rank 0: 1", "rank 1: 22"]
    site.ask("until 20", "c")
    for process in ranks:
        site.await_exit(process)


def test_a_variable_called_like_a_command_is_no_trap(site):
    ranks = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    site.ask("@0 !next = c = 5")
    assert "work.py(18)" in site.ask("next")
    site.ask("c")
    site.await_exit(ranks[0])


@pytest.mark.parametrize("flavour", ["pdb", "pdbpp"])
def test_attach_is_a_whole_session(site, flavour):
    (rank,) = site.start_ranks(1, "work.py", env={"MPDB_PDB": flavour})
    site.await_ranks(1)
    console = site.open_console()
    prompt = "(Pdb++) " if flavour == "pdbpp" else "(Pdb) "
    console.sendline("attach 0")
    console.expect_exact(prompt)
    assert "work.py(17)work()" in COLOR.sub("", console.before)
    console.send("p spec\t")  # completion is asked from the rank
    console.expect_exact("special")
    console.send("\n")
    console.expect_exact("'even'")
    console.expect_exact(prompt)
    console.send("\x1b[A")  # history
    console.expect_exact("p special")
    console.send("\n")
    console.expect_exact("'even'")
    console.expect_exact(prompt)
    console.sendline("interact")
    console.expect_exact(">>> ")
    console.sendline("value + 1000")
    console.expect_exact("1000\r\n")
    console.expect_exact(">>> ")
    console.sendeof()
    console.expect_exact(prompt)
    console.sendline("b 19")
    console.expect_exact(prompt)
    console.sendline("clear")
    console.expect_exact("Clear all breaks? ")
    console.sendline("y")
    console.expect_exact(prompt)
    console.sendline("p 'readline' in __import__('sys').modules")
    console.expect_exact("False")
    console.expect_exact(prompt)
    console.sendline("c")
    console.expect_exact("has exited")
    site.await_exit(rank)


def test_a_killed_console_leaves_the_rank_stopped(site):
    (rank,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    console = site.open_console()
    console.sendline("attach 0")
    console.expect_exact("(Pdb++) ")
    console.sendline("x = 5")
    console.expect_exact("(Pdb++) ")
    os.kill(console.pid, signal.SIGKILL)
    console.wait()
    again = site.open_console()
    again.sendline("attach 0")
    again.expect_exact("(Pdb++) ")
    again.sendline("p x + value")
    again.expect_exact("5\r\n")
    again.expect_exact("(Pdb++) ")
    again.sendline("c")
    again.expect_exact("has exited")
    site.await_exit(rank)


def test_a_console_killed_during_a_command_leaves_the_rank_stopped(site):
    (rank,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    console = site.open_console()
    console.sendline("attach 0")
    console.expect_exact("(Pdb++) ")
    console.sendline("import os, time;; while not os.path.exists('go'): time.sleep(0.05)")
    poll(lambda: "busy" in site.ask("ls"), "the rank to be busy")
    os.kill(console.pid, signal.SIGKILL)
    console.wait()
    (site.home / "go").touch()
    assert site.ask("@0 p value", options=["--deadline", "30"]) == "rank 0: 0\n"
    site.ask("c")
    site.await_exit(rank)


def test_end_of_input_detaches(site):
    (rank,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    console = site.open_console()
    console.sendline("attach 0")
    console.expect_exact("(Pdb++) ")
    console.sendeof()
    console.expect_exact("detached; rank 0 stays stopped")
    console.expect_exact("mpdb> ")
    console.sendeof()
    console.expect_exact("rank 0: still stopped")
    console.wait()
    piped = site.run_console(stdin="attach 0\np value")
    assert "detached; rank 0 stays stopped" in piped.stdout
    assert site.ask("@0 p value") == "rank 0: 0\n"
    site.ask("c")
    site.await_exit(rank)


def test_q_asks_and_can_detach_or_do_nothing(site):
    site.start_ranks(2, "work.py")
    site.await_ranks(2)
    console = site.open_console()
    console.sendline("attach 0")
    console.expect_exact("(Pdb++) ")
    console.sendline("q")
    console.expect_exact("d, c or k? ")
    console.sendline("")
    console.expect_exact("(Pdb++) ")
    console.sendline("q")
    console.expect_exact("d, c or k? ")
    console.sendline("d")
    console.expect_exact("stays stopped")
    assert "ranks 0-1" in site.ask("diff 1")
    assert "stays stopped" in site.ask("@all q")
    assert "ranks 0-1" in site.ask("diff 1")


def test_q_can_continue_all(site):
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    console = site.open_console()
    console.sendline("attach 0")
    console.expect_exact("(Pdb++) ")
    console.sendline("q")
    console.expect_exact("d, c or k? ")
    console.sendline("c")
    console.expect_exact("ranks 0-1: runs on")
    for process in ranks:
        site.await_exit(process)


def test_q_can_kill_the_job_and_peers_that_run(site):
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    site.start(
        sys.executable,
        "-c",
        "import time; time.sleep(600)",
        env={"MPDB_JOB": f"{site.job}-other", "RANK": "0"},
    )
    site.start(sys.executable, "-c", "import time; time.sleep(600)", env={"MPDB_JOB": site.job, "RANK": "2"})
    console = site.open_console()
    console.sendline("q")
    console.expect_exact("d, c or k? ")
    console.sendline("k")
    console.expect_exact("killed ranks 0-1")
    for process in ranks:
        site.await_exit(process, -signal.SIGKILL)
    site.await_exit(site.processes[-1], -signal.SIGKILL)
    assert site.processes[-2].poll() is None


def test_a_killed_rank_leaves_nothing_to_trip_over(site):
    ranks = site.start_ranks(3, "work.py")
    site.await_ranks(3)
    ranks[1].kill()
    ranks[1].wait()
    assert len(site.sockets()) == 3
    done = site.run_console("ls", "diff 1")
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "ranks 0, 2: 1 (equal on these; no value of rank 1)"
    assert len(site.sockets()) == 2
    assert "killed rank 0" in site.ask("kill 0")
    site.await_exit(ranks[0], -signal.SIGKILL)
    died, said = site.ask("diff 1").splitlines()
    assert died.startswith(f"*** rank 0 (pid {ranks[0].pid}) died ")
    assert said == "rank 2: 1"


def test_slow_dead_and_raising_ranks_do_not_delay_the_others(site):
    ranks = site.start_ranks(6, "work.py")
    site.await_ranks(6)
    os.kill(ranks[5].pid, signal.SIGSTOP)
    text = site.ask("diff slow()", options=["--deadline", "3"])
    assert "ranks 0, 4: 'quick' (equal on these; no value of ranks 1-3, 5)" in text
    assert "rank 1: *** no answer in 3 s: busy for" in text
    assert "rank 2: *** ValueError: broken on purpose" in text
    assert "rank 3: *** gone: the connection was closed" in text
    assert "rank 5: *** no answer in 3 s, and none to a question about its state" in text
    os.kill(ranks[5].pid, signal.SIGCONT)
    assert "interrupted" in site.ask("@1 interrupt")
    assert site.ask("@1 p 7") == "rank 1: 7\n"


@pytest.mark.parametrize("command", ["diff", "@all p"])
def test_values_cannot_write_to_the_screen(site, command):
    site.start_ranks(2, "work.py")
    site.await_ranks(2)
    forged = r"'\x1b[2J\x1b[1;1H\nranks 0-7: 0.25 (equal on all)'"
    named = f"type({forged}, (), {{'__repr__': lambda s: {forged}}})()"
    for value in (named, f"iter({named}, 1)", f"1 / 0 if {forged} else 0", f"exit({forged})"):
        text = site.ask(f"{command} {value}")
        assert "\x1b" not in text
        assert not [line for line in text.splitlines() if line.startswith("ranks 0-7")]


CONTROLS = "\x1b[2J\x1b]0;t\x07\x9b1A\r\x08\u202e\u2066\u2028\ud800\x00"


def test_all_that_is_shown_passes_one_filter(capsys, monkeypatch):
    terminal, prompts = Terminal(), []
    terminal.is_interactive = True
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or "")
    terminal.show(f"\x1b[31mred\x1b[0m\t{CONTROLS}\nline \u00e9")
    terminal.show_part(CONTROLS, is_prompt=True)
    terminal.echo(CONTROLS)
    terminal.read(f"{CONTROLS}> ", None)
    warn(CONTROLS)
    shown, warned = capsys.readouterr()
    assert shown.startswith("\x1b[31mred\x1b[0m\t")
    assert shown.count("\x1b[2J") == 1  # of the prompt
    for text in (shown, warned, *prompts):
        plain = COLOR.sub("", text)
        assert all(part.isprintable() for part in re.split("[\n\t]", plain)), plain
        assert r"\x9b1A\r\x08\u202e" in plain


def test_output_that_is_cut_keeps_its_prompt():
    output = CommandOutput(threading.get_ident(), lambda text: False)
    for line in ("x" * 20_000_000, "\n", "(Pdb++) "):
        output.write(line)
    text = output.take()
    assert text.endswith(" characters\n(Pdb++) ")
    assert len(text) < 600_000
    assert output.take() == ""


def test_ctrl_c_interrupts_an_expression_and_not_the_program(site):
    (rank,) = site.start_ranks(1, "work.py")
    site.await_ranks(1)
    console = site.open_console()
    console.sendline("attach 0")
    console.expect_exact("(Pdb++) ")
    console.sendline("import time; time.sleep(300)")
    poll(lambda: "busy" in site.ask("ls"), "the rank to be busy")
    console.sendintr()
    console.expect_exact("Interrupted")
    console.expect_exact("(Pdb++) ")
    console.sendline("c")
    console.expect_exact("has exited")
    site.await_exit(rank)


def test_jobs_are_kept_apart(site):
    site.start_ranks(1, "work.py")
    site.start_python("work.py", env={"RANK": "0", "WORLD_SIZE": "1", "MPDB_JOB": f"{site.job}-other"})
    poll(lambda: len(site.sockets()) == 2, "two stopped ranks")
    assert "choose one with: job NAME" in site.ask("diff 1")
    assert site.ask(f"job {site.job}-other", "diff 1") == f"job {site.job}-other\nrank 0: 1\n"
    assert site.ask("diff 1", options=[site.job]) == "rank 0: 1\n"
