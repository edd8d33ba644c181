"""Running ranks: stopped from the console without a Tra(), and asked for their stacks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from debugger_site import PROGRAMS, poll

STEADY = PROGRAMS / "steady.py"
LINE = next(at for at, line in enumerate(STEADY.read_text().splitlines(), 1) if "return loss" in line)


def start_steady(site, world):
    """Start armed ranks that run until a signal to end, and wait until all are armed."""
    go = site.home / "go"
    ranks = site.start_ranks(world, "steady.py", go)
    poll(lambda: len(list(site.runtime.glob("*.control"))) == world, "armed ranks")
    # A note has a hidden name until it is complete.
    poll(
        lambda: len(list(site.runtime.glob("[!.]*.armed"))) == world, "their notes, written after the sockets"
    )
    return ranks, go


def finish(site, ranks, go):
    """Let the ranks end, and check that their results equal those without a debugger."""
    go.touch()
    for number, rank in enumerate(ranks):
        site.await_exit(rank)
        assert "steps agree" in site.read(f"rank{number}")
    assert not [path.name for path in site.runtime.iterdir() if path.name != "history"]


def test_ranks_that_run_are_listed_stopped_and_let_go(site):
    ranks, go = start_steady(site, 2)
    table = site.ask("ls")
    assert table.count("(runs)") == 2
    assert "asked to stop" in site.ask("stop @1")
    site.await_ranks(1)
    table = site.ask("ls").splitlines()
    assert "steady.py" in table[1]
    assert "stop" in table[1].split()
    assert "(runs)" in table[2]
    assert site.ask("diff number > 0") == "rank 1: True\n"
    assert "is stopped already" in site.ask("@1 stop")
    assert site.ask("stop", "wait 2 60", "c").splitlines()[-1] == "ranks 0-1: runs on"
    finish(site, ranks, go)


def test_a_breakpoint_reaches_ranks_that_run(site):
    ranks, go = start_steady(site, 2)
    site.ask(f"break {STEADY}:{LINE} if number % 7 == 3")
    site.await_ranks(2)
    assert site.ask("diff number % 7") == "ranks 0-1: 3 (equal on all)\n"
    assert site.ask("c", "wait 2 60", "diff number % 7").splitlines()[-1] == "ranks 0-1: 3 (equal on all)"
    assert "Clear all breaks?" in site.ask("@all clear")
    assert "Deleted breakpoint" in site.ask("@all y")
    assert site.ask("c") == "ranks 0-1: runs on\n"
    assert "break needs FILE:LINE" in site.ask("break steady.py")
    finish(site, ranks, go)


@pytest.mark.parametrize("way", ["self", "faulthandler"])
def test_stacks_without_py_spy(site, way):
    ranks, go = start_steady(site, 2)
    text = site.ask("stacks", options=[site.job], env={"MPDB_STACKS": way})
    assert "steady.py" in text
    assert "in step" in text or "step (" in text
    assert "no stacks" not in text
    finish(site, ranks, go)


def test_a_stopped_rank_answers_for_its_own_stacks_and_others_name_the_remedy(site):
    (rank,) = site.start_ranks(1, "work.py")
    site.start(sys.executable, "-c", "import time; time.sleep(600)", env={"MPDB_JOB": site.job, "RANK": "1"})
    site.await_ranks(1)
    text = site.ask("stacks", env={"MPDB_STACKS": "self"})
    assert "work (" in text
    assert "neither stopped nor armed" in text
    assert "pip install py-spy" in text
    site.ask("c")
    site.await_exit(rank)


@pytest.mark.parametrize("action", ["stacks", "kill"])
def test_a_process_that_got_the_pid_of_a_dead_rank_is_left_alone(site, action):
    ranks, _ = start_steady(site, 1)
    (record,) = site.runtime.glob("[!.]*.armed")
    content = json.loads(poll(record.read_text, "a record that is written"))
    ranks[0].kill()
    ranks[0].wait()
    innocent = subprocess.Popen(["sleep", "300"])
    try:
        record.write_text(json.dumps({**content, "pid": innocent.pid}))
        site.run_console(
            *(["stacks"] if action == "stacks" else ["q"]),
            options=[site.job],
            stdin="k\n" if action == "kill" else None,
            env={"MPDB_STACKS": "faulthandler"},
        )
        time.sleep(0.3)
        assert innocent.poll() is None
        assert not [
            path for path in site.runtime.iterdir() if path.suffix in (".armed", ".stacks", ".control")
        ]
    finally:
        innocent.send_signal(signal.SIGKILL)
        innocent.wait()


def test_a_stale_socket_of_a_reused_pid_does_not_hold_timeouts(site):
    """A socket's name includes the start time of its process; another process may have reused the pid."""
    from multiprocessing_pdb.wire.identity import FileOwner
    from multiprocessing_pdb.wire.procfs import is_alive, read_start, send_signal

    owner = FileOwner.parse(f"job+3+{os.getpid()}-{read_start(os.getpid())}")
    assert (owner.job, owner.label) == ("job", "3")
    assert is_alive(owner.pid, owner.start)
    assert not is_alive(owner.pid, owner.start - 1)
    assert not send_signal(owner.pid, owner.start - 1, signal.SIGKILL)
    assert FileOwner.parse("nonsense") == FileOwner("nonsense", "", 0, 0)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("forward", "step 3, output of 1 (Scale): 2 nan of 8 elements; its inputs are finite"),
        ("backward", "step 3, gradient of the output of 0: "),
    ],
)
def test_on_nan_stops_the_first_rank_at_the_module_and_step(site, where, words):
    ranks = site.start_ranks(2, "bad_values.py", where, imports_torch=True)
    site.await_ranks(1)
    assert words in " ".join(site.ask("ls").split())
    name = "bad_output" if where == "forward" else "bad_gradient"
    assert "rank 1: float32[2, 4] cpu" in site.ask(f"diff {name}")
    assert site.ask("diff step") == "rank 1: 2\n"
    site.ask("c")
    for number, rank in enumerate(ranks):
        site.await_exit(rank)
        assert "losses [" in site.read(f"rank{number}")


def test_a_rank_can_stop_itself_with_names_and_all_others(site):
    """Another tool uses this to stop all ranks at its finding, with expected and actual at the prompt."""
    ranks = site.start_ranks(2, "bad_values.py", "api", imports_torch=True)
    poll(lambda: "asked" in site.read("rank1") or None, "rank 1 to ask")
    site.await_ranks(2)
    assert site.ask("@1 p actual.sum() - _expected.sum(), expected") == "rank 1: (tensor(-2.), 'mine')\n"
    table = site.ask("ls")
    assert "loss differs" in table
    assert "rank 1 has a finding" in table
    (site.home / "go").touch()
    site.ask("c")
    for rank in ranks:
        site.await_exit(rank)


def test_watch_and_until_stop_where_an_expression_changes(site):
    (rank,) = site.start_ranks(1, "watched.py")
    site.await_ranks(1)
    site.ask("until number > 10")
    assert site.ask("diff number") == "rank 0: 11\n"
    site.ask("watch state changes", "watch total nan", "c")
    assert "state changed" in site.ask("ls")
    assert site.ask("diff number") == "rank 0: 30\n"
    assert "watch total nan" in site.ask("@0 watch")
    site.ask("unwatch 0", "c")
    assert "nan in total" in site.ask("ls")
    assert "needs an expression" in site.ask("watch total")
    site.ask("unwatch", "c")
    site.await_exit(rank)
    assert site.read("rank0") == "total nan\n"


@pytest.mark.parametrize("place", [[], [27]])
def test_a_stop_that_is_asked_for_again_while_it_is_done_is_done_once(site, place):
    (process,) = site.start_ranks(1, "pending.py", *place)
    site.await_ranks(1)
    assert ("break" if place else "asked to") in site.ask("ls")
    site.ask("@all clear 1", "c")
    site.await_exit(process)
    assert site.read("rank0") == "total 3\n"


def test_a_stop_that_is_asked_for_twice_is_one_stop(site):
    ranks, go = start_steady(site, 1)
    site.ask(*["stop"] * 20)
    site.await_ranks(1)
    site.ask("c")
    finish(site, ranks, go)
