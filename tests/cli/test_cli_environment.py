"""A failure of the user's machine has an exit code that no verdict uses, and is not blamed on moeverify."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forked.python import ForkedPython
from typer.testing import Result

from moeverify.cli.context import open_context
from moeverify.cli.refusals import describe_refusal
from moeverify.errors import FormatError
from moeverify.verification.golden.file import read_golden

pytestmark = pytest.mark.slow

OUR_FAULT = "this is a fault of moeverify itself"


def do(
    command: str, folder: Path, python: Sequence[str] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    """Run a command line in a shell, with $M as moeverify, and return the result."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "M": " ".join([*python, "-m", "moeverify"]), "PYTHONPATH": paths}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("$M check fsdp2-2.yaml >&-", 0),
        ("$M check fsdp2-2.yaml >&- 2>&- <&-", 0),
        ("$M check nothing.yaml >&-", 2),
        ("$M check nothing.yaml 2>&-", 2),
        ("$M --help >&-", 0),
        ("$M check fsdp2-2.yaml >/dev/full", 3),
        ("$M --version >/dev/full", 3),
        ("$M check nothing.yaml 2>/dev/full", 3),
        # The reader has ended before the command writes; behind `| true` the two would race.
        ("mkfifo gone; true <gone & exec 3>gone; wait; $M --help >&3; exit $?", 141),
    ],
)
def test_streams_that_take_nothing(command: str, code: int, case_file: Path) -> None:
    done = do(command, case_file.parent)
    assert done.returncode == code, done
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["check", "run", "golden", "mesh"])
def test_a_deleted_current_folder(command: str, case_file: Path) -> None:
    done = do(f"mkdir gone; cd gone; rmdir ../gone; $M {command} case.yaml", case_file.parent)
    assert done.returncode in (2, 3)
    assert "the current folder was deleted" in done.stderr or "no such file" in done.stderr
    assert "Traceback" not in done.stderr
    assert OUR_FAULT not in done.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(28, "No space left on device", "out/logs"),
            "out/logs: No space left on device; free some space",
        ),
        (OSError(30, "Read-only file system", b"x"), "x: Read-only file system; name a place"),
        (PermissionError(13, "Permission denied"), "Permission denied; name a place"),
        (OSError("a bug of ours"), ""),
        (OSError(9, "Bad file descriptor"), ""),
    ],
)
def test_what_is_a_refusal(error: OSError, text: str) -> None:
    assert describe_refusal(error).startswith(text)
    assert bool(describe_refusal(error)) == bool(text)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "out"), MemoryError()])
def test_a_refusal_is_no_fault_of_ours(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as caught, open_context():
        raise error
    assert caught.value.exit_code == 3
    told = capsys.readouterr().err
    assert OUR_FAULT not in told
    assert "Traceback" not in told


def test_goldens_go_to_a_place_that_takes_them(invoke: Callable[..., Result], case_file: Path) -> None:
    (case_file.parent / "file").touch()
    done = invoke("golden", case_file, "--goldens", case_file.parent / "file" / "golden")
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
    assert done.stdout == ""  # nothing was started


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"version": ' + b"1" * 5000 + b"}", b"\xff\xfe"])
def test_goldens_of_no_sense(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.cpu.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"tiny\.cpu\.json"):
        read_golden(path)


@pytest.mark.ranks
def test_a_golden_that_never_ends_is_over_its_time_and_the_others_pass(
    case_file: Path, python: ForkedPython
) -> None:
    folder = case_file.parent
    (folder / "slow.py").write_text(
        "import time\n\n\n"
        "def build(vocab_size=32):\n    try:\n        time.sleep(600)\n    except Exception:\n        pass\n"
    )
    (folder / "slow.yaml").write_text(
        "recipe: {name: slow, model: {factory: 'slow:build', vocab_size: 32}}\nlayout: {dp_shard: 2}\n"
    )
    os.mkfifo(folder / "pipe.yaml")
    done = do("$M run . --device cpu --cache cache --timeout 20 --json result.json", folder, python.command())
    assert done.returncode == 3
    assert "each on one device: tiny, slow)" in done.stdout
    assert "[1/2] pass     fsdp2-2" in done.stdout
    assert "one device did not compute the golden of slow within 20 s; raise --timeout" in done.stdout
    assert "a named pipe, and no regular file" in done.stderr
    assert "left out: pipe.yaml; the other cases run" in done.stderr
    assert "refused: pipe.yaml" in (folder / "result.json").read_text()
