"""Reports on dead ranks: the signal or exit code, and the last known line."""

import os
import signal
import subprocess
import sys

import pytest
from debugger_site import poll
from test_mpdb_running import start_steady

from multiprocessing_pdb.wire import process_exit
from multiprocessing_pdb.wire.process_exit import ProcessExit, describe_status

CRASHING = """\
import ctypes, sys
from pathlib import Path
from multiprocessing_pdb import arm
arm()
def crash():
    ctypes.string_at(0)
while not Path(sys.argv[1]).exists():
    pass
crash()
"""


def test_an_open_console_says_which_rank_died_of_what_and_where(site):
    ranks = site.start_ranks(3, "work.py")
    site.await_ranks(3)
    console = site.open_console(site.job)
    ranks[1].kill()
    ranks[1].wait()
    console.sendline("diff 1")
    console.expect_exact(f"*** rank 1 (pid {ranks[1].pid}) died by SIGKILL; last line ")
    console.expect_exact("work.py:")
    console.expect_exact("ranks 0, 2: 1 (equal on these; no value of rank 1)")
    console.sendline("c")
    console.expect_exact("ranks 0, 2: runs on")
    for rank in (ranks[0], ranks[2]):
        site.await_exit(rank)
    console.sendline("ls")
    console.expect_exact("no rank is stopped")
    assert "rank 0" not in console.before  # it ended normally
    console.close()


def test_a_console_opened_later_says_what_is_known(site):
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    ranks[0].kill()
    ranks[0].wait()
    said = site.ask("ls", "ls")
    assert said.count(f"rank 0 (pid {ranks[0].pid}) died without a word, as by SIGKILL") == 1


def test_a_death_in_another_job_than_the_chosen_one_is_said_as_such(site):
    (rank,) = site.start_ranks(1, "work.py", env={"MPDB_JOB": "other"})
    site.await_ranks(1)
    rank.kill()
    rank.wait()
    assert f"rank 0 of job other (pid {rank.pid}) died without a word" in site.ask("ls", options=[site.job])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_armed_rank_that_runs(site, number):
    ranks, go = start_steady(site, 2)
    console = site.open_console(site.job)
    console.sendline("ls")
    console.expect_exact("(runs)")
    os.kill(ranks[0].pid, number)
    ranks[0].wait()
    console.sendline("ls")
    console.expect_exact(f"rank 0 (pid {ranks[0].pid}) died by {number.name}; ")
    console.expect("[0-9]+ s before it was at .*steady.py:[0-9]+")
    console.close()
    go.touch()
    site.await_exit(ranks[1])


def test_a_crash_in_c_leaves_its_last_line(site):
    program, go = site.home / "crashing.py", site.home / "go"
    program.write_text(CRASHING)
    rank = site.start(sys.executable, program, go, env={"RANK": "0", "MPDB_JOB": site.job})
    poll(lambda: list(site.runtime.glob("*.armed")), "the armed rank")
    go.touch()
    rank.wait()
    said = site.ask("ls", options=[site.job])
    assert f"rank 0 (pid {rank.pid}) died: Segmentation fault; last line " in said
    assert f"{program}:6 in crash" in said or "ctypes" in said


def test_an_exit_is_read_before_and_after_it_was_waited_for(monkeypatch):
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=-1
    ) as child:
        end = ProcessExit(child.pid)
        assert end.read_status() is None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert describe_status(end.read_status()) == "ended with exit code 3"
    assert end.read_status() in (None, 3 << 8)  # None before Linux 6.15
    monkeypatch.setattr(process_exit, "_GET_INFO", 0)
    assert end.read_status() is None
    end.close()
    assert describe_status(0) == ""
