"""A flipped bit anywhere in a recorded run is found, with the file and the line, before any comparison."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moeverify.checksum import open_line, seal_line
from moeverify.errors import FormatError
from moeverify.scripts.record.lines import VERSION
from moeverify.scripts.record.operators import read_operators
from moeverify.scripts.record.read import RecordedRun
from moeverify.scripts.record.recorder import ScriptRecorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import install


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a script of one step."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    recorder = ScriptRecorder(Settings(out=folder, last=0, outputs=True, operators=0), 0, 1)
    hooks = install(recorder)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(6).reshape(2, 3)).square().sum().backward()
    optimizer.step()
    recorder.close()
    hooks.remove()
    return folder


def read_all(folder: Path) -> None:
    """Read every line, and the values of every tensor."""
    for rank in RecordedRun.read(folder).ranks:
        for line in rank.values.values():
            rank.read(line)
        for drawn in rank.drawn:
            rank.read_drawn(drawn)
        for output in rank.outputs:
            rank.read_output(output)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("rank0.jsonl", read_all),
        ("rank0.bin", read_all),
        ("rank0.operators.json.gz", read_operators),
        ("rank0.operators.bin", read_operators),
    ],
)
def test_a_flipped_bit_is_found(recorded: Path, name: str, read: Callable[[Path], object]) -> None:
    read(recorded)
    path, dice = recorded / name, random.Random(name)
    good = path.read_bytes()
    places = set(range(len(good)))
    if name.endswith(
        "gz"
    ):  # bits that change nothing: time stamp and flags, and the padding of the last block
        places -= {*range(10), len(good) - 9}
    for at in dice.sample(sorted(places), min(40, len(places))):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << dice.randrange(8)]) + good[at + 1 :])
        number = good.count(b"\n", 0, at) + 1
        line = f":{number}: " if name.endswith("jsonl") else ""
        with pytest.raises(FormatError, match=rf"{name}{line}.*(damaged|not valid JSON).*; record it"):
            read(recorded)
    path.write_bytes(good)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("header", {"world_size": 10**9}, "world_size"),
        ("header", {"world_size": 1000}, "lacks the ranks 1-999 of 1000"),
        ("header", {"version": 1}, f"has version 1, this moeverify reads {VERSION}"),
        ("values", {"offset": None}, "neither values nor a sketch"),
        ("output", {"offset": -8}, "offset: -8"),
        ("values", {"step": 10**20}, "step: 100000000000000000000 is beyond 64 bits"),
        ("values", {"squares": float("nan")}, "squares: nan is not a finite number"),
    ],
)
def test_a_sealed_line_with_an_impossible_value_is_refused(
    recorded: Path, tmp_path: Path, kind: str, change: dict[str, object], message: str
) -> None:
    shutil.copytree(recorded, tmp_path / "run")
    path = tmp_path / "run" / "rank0.jsonl"
    lines = [json.loads(open_line(line)) for line in path.read_bytes().splitlines()]
    next(line for line in lines if line["line"] == kind).update(change)
    path.write_bytes(b"".join(seal_line(json.dumps(line).encode()) + b"\n" for line in lines))
    with pytest.raises(FormatError, match=message):
        read_all(tmp_path / "run")


def test_lines_of_before_the_checksums_are_refused_with_a_remedy(recorded: Path, tmp_path: Path) -> None:
    lines = [open_line(line) for line in (recorded / "rank0.jsonl").read_bytes().splitlines()]
    (tmp_path / "rank0.jsonl").write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(FormatError, match=r"rank0\.jsonl:1: .*record it again"):
        RecordedRun.read(tmp_path)
