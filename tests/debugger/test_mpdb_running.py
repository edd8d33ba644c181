"""Ranks that run: stopped from the console without a Tra() in their way, and asked for their stacks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import PROGRAMS, poll

STEADY = PROGRAMS / "steady.py"
LINE = next(at for at, line in enumerate(STEADY.read_text().splitlines(), 1) if "return loss" in line)


def start_steady(site, world):
    """Start armed ranks that run until told to end, and wait until all are armed."""
    go = site.home / "go"
    ranks = site.start_ranks(world, "steady.py", go)
    poll(lambda: len(list(site.runtime.glob("*.control"))) == world, "armed ranks")
    return ranks, go


def finish(site, ranks, go):
    """Let the ranks end, and check that they computed what they compute alone."""
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
    (record,) = site.runtime.glob("*.armed")
    content = json.loads(record.read_text())
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
    """The name of a socket says when its process started; the pid alone may be somebody else's now."""
    from multiprocessing_pdb.wire.identity import FileOwner
    from multiprocessing_pdb.wire.procfs import is_alive, read_start, send_signal

    owner = FileOwner.parse(f"job+3+{os.getpid()}-{read_start(os.getpid())}")
    assert (owner.job, owner.label) == ("job", "3")
    assert is_alive(owner.pid, owner.start)
    assert not is_alive(owner.pid, owner.start - 1)
    assert not send_signal(owner.pid, owner.start - 1, signal.SIGKILL)
    assert FileOwner.parse("nonsense") == FileOwner("nonsense", "", 0, 0)
