"""Watched scripts that hang or end early: who waits where, with the lines of both, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

PROGRAM = Path(__file__).parent / "programs" / "hang.py"

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

HANGS = {
    "opposite": [
        "rank 0 waits in all_reduce #3 of group (0,1), named 1, called at {first} in opposite; "
        "rank 1 never entered it: it waits in all_reduce #3 of group (0,1), named 2, called at {second} in opposite",
        "rank 1 waits in all_reduce #3 of group (0,1), named 2, called at {second} in opposite; "
        "rank 0 never entered it: it waits in all_reduce #3 of group (0,1), named 1, called at {first} in opposite",
    ],
    "different": [
        "rank 0 waits in all_reduce #2 of group (0,1) called at {sums} in different; rank 1 entered another "
        "collective of that group: it waits in barrier #2 of group (0,1) called at {meets} in different",
        "rank 1 waits in barrier #2 of group (0,1) called at {meets} in different; rank 0 entered another "
        "collective of that group: it waits in all_reduce #2 of group (0,1) called at {sums} in different",
        "the ranks disagree on collective #2 of group (0,1): rank 0 all_reduce on float32[2], called at {sums} "
        "in different; rank 1 barrier, called at {meets} in different",
    ],
    "holds_lock": [
        "rank 0 waits in all_reduce #2 of group (0,1) called at {waits for the lock} in holds_lock; "
        "rank 1 never entered it: it is at {no signal interrupts it} in holds_lock"
    ],
    "stops": [
        "rank 1 over its time: its process is stopped (SIGSTOP)",
        "rank 0 waits in all_reduce #2 of group (0,1) called at {waits for the stopped} in stops; "
        "rank 1 never entered it: its place is not known",
    ],
    "uneven": [
        "rank 0 waits in all_reduce #5 of group (0,1) called at {sums gradients} in uneven; "
        "rank 1 never entered it: it is at {has no batch} in uneven"
    ],
    "unreceived": [
        "rank 0 waits in recv #1 with peer 1 of group (0,1) called at {never sent} in unreceived; "
        "rank 1 never entered it: it is at {sends nothing} in unreceived"
    ],
}


def start(folder: Path, *kinds: str) -> subprocess.Popen[str]:
    watch = [sys.executable, "-m", "moeverify", "watch", "--guard", "--hang", "1", "--"]
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [*watch, sys.executable, str(PROGRAM), str(folder), *kinds],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )


def find_lines(texts: list[str]) -> list[str]:
    """Replace each comment in braces by the place of its line."""
    lines = PROGRAM.read_text().splitlines()
    numbers = {line.partition("# ")[2]: number for number, line in enumerate(lines, start=1)}
    return [re.sub("{(.*?)}", lambda found: f"{PROGRAM}:{numbers[found[1]]}", text) for text in texts]


def read_report(process: subprocess.Popen[str], head: str, number: int) -> list[str]:
    """Return the indented lines of the next report, which must begin with `head`."""
    assert process.stderr is not None
    said = ""
    while not (line := process.stderr.readline()).startswith(f"moeverify watch: {head}"):
        said += line
        assert line, said
    return [process.stderr.readline().strip() for _ in range(number)]


def check_nothing_left(folder: Path) -> None:
    for pid in (folder / "pids").read_text().split():
        with suppress(psutil.NoSuchProcess):  # an orphan that has ended may wait for its reaper
            assert psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    assert list((folder / "tmp").glob("moeverify-*")) == []


def test_hangs_are_explained_and_a_signal_ends_the_script(tmp_path: Path) -> None:
    process = start(tmp_path, *HANGS)
    for kind, waits in HANGS.items():
        found = read_report(process, "a collective has waited for 1 s (raise --hang; load ", len(waits))
        assert found == find_lines(waits), kind
        assert process.poll() is None  # a report alone ends nothing
        if kind != "unreceived":
            (tmp_path / f"next-{kind}").touch()
    process.send_signal(signal.SIGTERM)
    # The program dies at once, without a thought for its ranks.
    assert read_report(process, "the script ended with code 143", 1)[0].startswith("rank 0 waits in recv #1 ")
    process.communicate()
    assert process.returncode == 143
    check_nothing_left(tmp_path)


def test_a_rank_that_raises_is_named_with_those_that_waited_for_it(tmp_path: Path) -> None:
    process = start(tmp_path, "raises")
    found = read_report(process, "the script ended with code 1", 2)
    assert found == find_lines(
        [
            "rank 1 raised ValueError: rank 1 has no data",
            "rank 0 waits in all_reduce #2 of group (0,1) called at {waits for the failed} in raises; "
            "rank 1 never entered it: its process has ended",
        ]
    )
    process.communicate()
    assert process.returncode == 1
    check_nothing_left(tmp_path)
