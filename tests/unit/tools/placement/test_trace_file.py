"""Files of load traces: appended, continued, truncated by a crash, damaged, and of other contents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moeverify.errors import CaseError, FormatError
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.load_trace import TraceHeader, sum_steps
from moeverify.tools.placement.synthetic import KINDS, make_trace
from moeverify.tools.placement.trace_file import TraceWriter, read_trace

HEADER = TraceHeader((1, 2), 4, 3, model="tiny", top_k=2)


def make_copies(seed: int, most: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, HEADER.shape)


def write(path: Path, steps: dict[int, np.ndarray], header: TraceHeader = HEADER) -> None:
    with TraceWriter(path, header) as writer:
        for step, copies in steps.items():
            writer.append(step, copies)


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "load.trace"
    # One, two, four and eight bytes per integer in one file.
    steps = {step: make_copies(step, most) for step, most in enumerate((200, 60_000, 1 << 31, 1 << 40))}
    write(path, steps)
    trace = read_trace(path)
    assert (trace.header, trace.steps, trace.num_lost_bytes) == (HEADER, (0, 1, 2, 3), 0)
    assert (trace.copies == np.stack(list(steps.values()))).all()
    assert read_trace(path, last=1).steps == (3,)
    assert (read_trace(path, last=2).copies == trace.take_last(2).copies).all()


def test_a_run_that_goes_back_to_a_checkpoint_replaces_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "load.trace"
    write(path, {0: make_copies(0), 1: make_copies(1), 2: make_copies(2)})
    write(path, {1: make_copies(11), 2: make_copies(12)})
    trace = read_trace(path)
    assert trace.steps == (0, 1, 2)
    assert (trace.copies[1:] == np.stack([make_copies(11), make_copies(12)])).all()


def test_every_cut_leaves_the_steps_before_it(tmp_path: Path) -> None:
    path = tmp_path / "load.trace"
    write(path, {0: make_copies(0)})
    first = path.stat().st_size
    write(path, {1: make_copies(1)})
    whole = path.read_bytes()
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        trace = read_trace(path)
        assert trace.steps == (0,)
        assert trace.num_lost_bytes == size - first
        write(path, {1: make_copies(1)})
        assert path.read_bytes() == whole
    path.write_bytes(whole + bytes(100))  # space that a file system allocated before a crash
    assert read_trace(path).steps == (0, 1)
    write(path, {2: make_copies(2)})
    assert read_trace(path).steps == (0, 1, 2)


def test_a_killed_process_loses_no_step_that_it_appended(tmp_path: Path) -> None:
    path = tmp_path / "load.trace"
    code = (
        "import os, signal, numpy as np\n"
        "from pathlib import Path\n"
        "from moeverify.tools.placement.load_trace import TraceHeader\n"
        "from moeverify.tools.placement.trace_file import TraceWriter\n"
        f"writer = TraceWriter(Path({str(path)!r}), TraceHeader((0,), 2))\n"
        "for step in range(5):\n"
        "    writer.append(step, np.full((1, 2, 1), step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert read_trace(path).copies[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_damage_inside_is_said(tmp_path: Path) -> None:
    path = tmp_path / "load.trace"
    write(path, {step: make_copies(step) for step in range(3)})
    content = bytearray(path.read_bytes())
    start = content.index(b"\n") + 1
    for offset in range(start, start + 60, 7):
        bad = bytearray(content)
        bad[offset] ^= 0x55
        path.write_bytes(bad)
        with pytest.raises(FormatError, match=r"load.trace: .*damaged"):
            read_trace(path)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"", FormatError, "no load trace"),
        (b"hello\n", FormatError, "no load trace"),
        (b'{"format": "moeverify load trace", "version": 7}\n', FormatError, "version 7, expected 2"),
        (
            b'{"format": "moeverify load trace", "version": 1}\n',
            FormatError,
            "header of this trace is damaged",
        ),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: bytes, error: type[Exception], words: str) -> None:
    path = tmp_path / "load.trace"
    path.write_bytes(content)
    with pytest.raises(error, match=words):
        read_trace(path)


def test_a_trace_without_steps_or_without_a_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "load.trace"
    with pytest.raises(CaseError, match="there is no such file"):
        read_trace(path)
    write(path, {})
    with pytest.raises(CaseError, match="holds no step"):
        read_trace(path)
    with pytest.raises(CaseError, match="save it again"):
        read_trace(tmp_path)


def test_a_trace_of_another_model_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "load.trace"
    write(path, {0: make_copies(0)})
    before = path.read_bytes()
    with pytest.raises(CaseError) as error:
        TraceWriter(path, TraceHeader((1, 3), 8, 3, model="other", top_k=2))
    assert {problem.path for problem in error.value.problems} == {"model", "layers", "num_experts"}
    assert path.read_bytes() == before


def test_wrong_counts_are_not_recorded(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "load.trace", HEADER) as writer:
        with pytest.raises(ValueError, match="expected token copies of shape"):
            writer.append(0, np.zeros((2, 4), dtype=np.int64))
        with pytest.raises(ValueError, match="cannot be negative"):
            writer.append(0, make_copies(0) - 1000)
        writer.append(0, make_copies(0))
    assert read_trace(tmp_path / "load.trace").steps == (0,)


def test_arrays_of_numpy_are_traces(tmp_path: Path) -> None:
    path = tmp_path / "load.npy"
    counts = np.random.default_rng(0).integers(0, 9, (5, 3, 4, 2))
    for array, shape in (
        (counts, (5, 3, 4, 2)),
        (counts[..., 0], (5, 3, 4, 1)),
        (counts[0, ..., 0], (1, 3, 4, 1)),
    ):
        np.save(path, array)
        assert read_trace(path).copies.shape == shape
    assert read_trace(path, last=1).steps == (0,)
    for bad, words in (
        (counts - 1, "from 0 to 1e\\+15"),
        (np.full((2, 2), np.nan), "from 0 to"),
        (np.full((2, 2), 1e308), "from 0 to"),
        (np.zeros(3), "got shape"),
        (np.zeros((2, 2), dtype=complex), "dtype complex"),
    ):
        np.save(path, bad)
        with pytest.raises(CaseError, match=words):
            read_trace(path)
    path.write_bytes(path.read_bytes()[:90])
    with pytest.raises(FormatError, match="save it again"):
        read_trace(path)


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_traces_depend_on_their_seed_alone(kind: str) -> None:
    first, second, other = (
        make_trace(
            kind, seed=seed, num_layers=2, num_experts=16, num_sources=3, num_steps=3, copies_per_step=1000
        )
        for seed in (1, 1, 2)
    )
    assert (first.copies == second.copies).all()
    assert (first.copies != other.copies).any()
    assert (first.copies.sum((2, 3)) == 1000).all()


def test_sources_count_where_there_are_as_many_as_ranks() -> None:
    trace = make_trace("zipf", seed=0, num_sources=4)
    known, unknown = sum_steps(trace, Cluster(4)), sum_steps(trace, Cluster(8))
    assert not known.is_even
    assert (known.copies == trace.copies[0]).all()
    assert unknown.is_even
    np.testing.assert_allclose(unknown.copies.sum(-1), trace.copies[0].sum(-1))
