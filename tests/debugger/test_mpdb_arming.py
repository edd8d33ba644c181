"""`arm PID`: reach processes that never called arm() on Python 3.14; print instructions on older versions.

MPDB_TEST_PYTHON names a Python 3.14 or later when the tests run on an older one.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from debugger_site import ROOT, poll

from multiprocessing_pdb.console import arming
from multiprocessing_pdb.wire.runtime_directory import RuntimeDirectory

PYTHON = os.environ.get("MPDB_TEST_PYTHON") or sys.executable
PROBE = [PYTHON, "-c", "import sys; sys.exit(not hasattr(sys, 'remote_exec'))"]
HAS_REMOTE_EXEC = subprocess.call(PROBE) == 0
PLAIN = """\
import sys, time
from pathlib import Path
total = 0
def step(number):
    time.sleep(0.01)
    return number
number = 0
while not Path(sys.argv[1]).exists():
    total += step(number)
    number += 1
print("agrees", total == number * (number - 1) // 2, "modules", "multiprocessing_pdb" in sys.modules)
"""


@pytest.mark.skipif(
    not HAS_REMOTE_EXEC, reason="needs sys.remote_exec of Python 3.14; MPDB_TEST_PYTHON names one"
)
def test_ranks_that_know_nothing_of_the_debugger_are_stopped(site):
    program, go = site.home / "plain.py", site.home / "go"
    program.write_text(PLAIN)
    ranks = []
    for rank in (0, 1):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MPDB_JOB": site.job, "PYTHONPATH": ""}
        ranks.append(site.start(PYTHON, program, go, env=env, name=f"rank{rank}"))
    poll(lambda: all(str(program) in psutil.Process(r.pid).cmdline() for r in ranks), "the programs")
    line = [PYTHON, "-m", "multiprocessing_pdb", site.job]
    for command in ("arm all", f"arm {ranks[0].pid}", "stop", "wait 2 60", "diff number >= 0", "c"):
        line += ["-c", command]
    done = subprocess.run(
        line, env=site.env, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr + site.explain()
    assert said[0] == f"rank 0 (pid {ranks[0].pid}), rank 1 (pid {ranks[1].pid}): armed"
    assert said[1] == f"pid {ranks[0].pid} is armed, in job {site.job}"
    assert "ranks 0-1: True (equal on all)" in said
    go.touch()
    for number, rank in enumerate(ranks):
        site.await_exit(rank)
        assert site.read(f"rank{number}") == "agrees True modules True\n"
    assert not list(site.runtime.iterdir())


def test_what_cannot_be_armed_says_why(site, monkeypatch):
    process = site.start(sys.executable, "-c", "import time; time.sleep(600)")
    done = site.run_console(f"arm {process.pid}", "arm", options=[site.job])
    assert done.returncode == 1
    if not hasattr(sys, "remote_exec"):
        assert "only Python 3.14 and later" in done.stdout
        assert "arm() in the program" in done.stdout
    assert "arm needs a pid, or all" in done.stdout
    asked = []
    monkeypatch.setattr(sys, "remote_exec", lambda pid, path: asked.append(path), raising=False)
    monkeypatch.setenv("MPDB_DIR", "/tmp/somewhere-else")
    with pytest.raises(arming.ArmError, match="start the console with MPDB_DIR="):
        arming.arm_process(process.pid)
    with pytest.raises(arming.ArmError, match="there is no process"):
        arming.arm_process(2**22 + 1)
    assert not asked


def _start_sleeper(site, name):
    process = site.start(sys.executable, "-c", "import time; time.sleep(600)", name=name)
    # Popen returns in the middle of exec, when /proc/PID/environ is still empty
    poll(lambda: "MPDB_DIR" in psutil.Process(process.pid).environ(), "the program")
    return process


def test_a_process_that_does_not_come_to_it_is_asked_once(site, monkeypatch):
    process = _start_sleeper(site, "first")
    asked = []
    monkeypatch.setattr(sys, "remote_exec", lambda pid, path: asked.append(path), raising=False)
    monkeypatch.setenv("MPDB_DIR", str(site.runtime))
    monkeypatch.setattr(arming, "_ARM_SECONDS", 0.1)
    for _ in range(2):
        with pytest.raises(arming.ArmError, match="a call into C has to end first"):
            arming.arm_process(process.pid)
    assert len(asked) == 1
    assert Path(asked[0]).stat().st_mode & 0o777 == 0o600
    process.kill()
    process.wait()
    with pytest.raises(arming.ArmError, match="there is no process"):
        arming.arm_process(process.pid)
    with RuntimeDirectory.open(site.runtime) as directory:
        arming._remove_scripts_of_the_dead(directory)
    assert not list(site.runtime.iterdir())

    def refuse(pid, path):
        raise PermissionError

    monkeypatch.setattr(sys, "remote_exec", refuse)
    other = _start_sleeper(site, "other")
    with pytest.raises(arming.ArmError, match="ptrace_scope"):
        arming.arm_process(other.pid)
    assert not list(site.runtime.iterdir())
