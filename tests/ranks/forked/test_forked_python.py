"""Forked test processes behave like started ones: their inputs, their end, and their remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forked.python import ForkedPython

TELL = """\
import gc, json, os, sys, tempfile
print(json.dumps({
    "name": __name__, "words": sys.argv, "folder": os.getcwd(), "first": sys.path[:2], "told": os.environ.get("TOLD"),
    "temporary": tempfile.gettempdir(), "command": open("/proc/self/cmdline").read().strip("\\0").split("\\0"),
    "collects": gc.isenabled(),
    "leads": os.getsid(0) == os.getpid(), "is_parent": os.getppid() == int(os.environ["PARENT"]),
    "torch": "torch" in sys.modules, "server": any(name.startswith("forked") for name in sys.modules),
}))
"""
WAIT = "import time\nprint('waits', flush=True)\ntime.sleep(100)\n"


@pytest.fixture
def forked(python: ForkedPython) -> list[str]:
    command = python.command()
    if command == [sys.executable]:
        pytest.skip("processes are forked on Linux, and where no test uses a GPU")
    return command


@pytest.fixture
def waiting(forked: list[str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Return a waiting process as its starter sees it, and the pid of the process that really waits."""
    (tmp_path / "wait.py").write_text(WAIT)
    with subprocess.Popen([*forked, tmp_path / "wait.py"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        [pid] = find(str(tmp_path / "wait.py"), apart_from=process.pid)
        yield process, pid
        process.kill()


def find(word: str, apart_from: int = 0) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if word in (process.info["cmdline"] or ()) and process.pid != apart_from
        if process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def wait_until_gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("form", ["file", "module", "text"])
def test_a_process_gets_what_it_was_started_with(forked: list[str], tmp_path: Path, form: str) -> None:
    file = tmp_path / "told" / "teller.py"
    file.parent.mkdir()
    file.write_text(TELL)
    (tmp_path / "other").mkdir()
    words = {"file": [str(file)], "module": ["-m", "teller"], "text": ["-c", TELL]}[form]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(file.parent), os.environ.get("PYTHONPATH")])),
        "TOLD": "something",
        "TMPDIR": str(tmp_path),
        "PARENT": str(os.getpid()),
    }
    seen: list[dict[str, Any]] = []
    for command in ([sys.executable], forked):
        done = subprocess.run(
            [*command, *words, "a", "b c"],
            env=variables,
            cwd=tmp_path / "other",
            capture_output=True,
            text=True,
            check=True,
            start_new_session=True,
        )
        assert done.stderr == ""
        seen.append(json.loads(done.stdout))
    started, forked_one = seen
    assert (started.pop("torch"), forked_one.pop("torch")) == (False, True)
    for one in seen:  # Python leaves the first entry empty for -c
        one["first"] = [str((tmp_path / "other" / entry).resolve()) for entry in one["first"]]
    assert forked_one == started


@pytest.mark.parametrize(
    ("text", "code"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_the_end_of_a_process_is_the_same(forked: list[str], text: str, code: int) -> None:
    text = f"import atexit; atexit.register(print, 'bye'); {text}"
    done = subprocess.run([*forked, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout == ("bye\n" if code >= 0 else "")
    assert ("ZeroDivisionError" in done.stderr) == (text.endswith("1 / 0"))


def test_signals_arrive(waiting: tuple[subprocess.Popen[str], int]) -> None:
    process, pid = waiting
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    assert wait_until_gone(pid)


def test_what_is_killed_leaves_nothing(waiting: tuple[subprocess.Popen[str], int]) -> None:
    process, pid = waiting
    process.kill()
    assert wait_until_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_tests(tmp_path: Path, forked: list[str], number: signal.Signals) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    text = (
        f"import subprocess, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from forked.python import ForkedPython\n"
        "python = ForkedPython()\n"
        f"subprocess.run([*python.command(), {str(tmp_path / 'wait.py')!r}])\n"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == "waits\n"
        members = psutil.Process(tests.pid).children(recursive=True)
        assert len(members) == 3  # the server, its forked process, and the client
        tests.send_signal(number)
        tests.wait(10)
    assert all(wait_until_gone(member.pid) for member in members)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_LOGS", "PYTHONHASHSEED"])
def test_what_is_read_at_the_import_is_read_again(forked: list[str], name: str) -> None:
    text = "import sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [*forked, "-c", text], env={**os.environ, name: "3"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_what_torch_sets_itself_is_no_reason_to_import_it_again(forked: list[str]) -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # the first one sets the compiler's folder
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    text = "import sys; print('torch' in sys.modules)"
    done = subprocess.run([*forked, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("file", ["sitecustomize.py", "torch.py", "moeverify/__init__.py"])
def test_other_modules_of_the_same_name_are_imported(forked: list[str], tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    name = file.partition("/")[0].removesuffix(".py")
    done = subprocess.run(
        [*forked, "-c", f"import {name}; print({name}.__file__)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{tmp_path / file}\n"
