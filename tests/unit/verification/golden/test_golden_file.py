"""The golden in git: written completely or not at all, read or refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeverify.errors import FormatError
from moeverify.verification.golden.file import GoldenFile, golden_path, read_golden, write_golden
from moeverify.verification.golden.proximity import distance, worst_distance

GOLDEN = GoldenFile(
    name="tiny",
    recipe="0123456789abcdef",
    device_class="cpu",
    losses={"1/loss/total": 2.5, "0/loss/total": 3.25},
    tensors={"0/gradient/b": [1.0, 0.5, -0.25], "0/gradient/a": [2.0, 1.0, 1.0], "0/router_ids/r": "ab12"},
)


def test_there_and_back(tmp_path: Path) -> None:
    path = golden_path(tmp_path / "golden", "tiny", "cpu")
    assert path == tmp_path / "golden" / "tiny.cpu.json"
    assert read_golden(path) is None
    write_golden(path, GOLDEN)
    assert read_golden(path) == GOLDEN
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_text_is_sorted_with_one_entry_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tiny.cpu.json"
    write_golden(path, GOLDEN)
    lines = path.read_text().splitlines()
    assert [line.strip() for line in lines if "gradient" in line] == [
        '"0/gradient/a": [2.0, 1.0, 1.0],',
        '"0/gradient/b": [1.0, 0.5, -0.25],',
    ]
    keys = list(json.loads(path.read_text()))
    assert keys == sorted(keys)
    write_golden(
        tmp_path / "again", GOLDEN.model_copy(update={"losses": dict(sorted(GOLDEN.losses.items()))})
    )
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.cpu.json"
    write_golden(path, GOLDEN)
    whole = path.read_text().rstrip()
    for length in range(len(whole)):
        path.write_text(whole[:length])
        with pytest.raises(FormatError, match=r"tiny\.cpu\.json.*record it anew with `moeverify golden`"):
            read_golden(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "version 9, this is version 1"),
        ({"losses": {"0/loss/total": "big"}}, "losses.0/loss/total"),
        ({"more": 1}, "more: Extra inputs"),
    ],
)
def test_content_that_is_no_golden(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.cpu.json"
    path.write_text(json.dumps(GOLDEN.model_dump() | change))
    with pytest.raises(FormatError, match=message):
        read_golden(path)


def test_a_merge_conflict_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tiny.cpu.json"
    write_golden(path, GOLDEN)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "<<<<<<< HEAD", *lines[3:]]))
    with pytest.raises(FormatError, match=r"tiny\.cpu\.json:4: not valid JSON"):
        read_golden(path)


def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.cpu.json"
    write_golden(path, GOLDEN)

    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_golden(path, GOLDEN.model_copy(update={"recipe": "f" * 16}))
    assert read_golden(path) == GOLDEN
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_distances() -> None:
    assert distance([2.0, 1.0, 1.0], [2.0, 1.0, 1.5]) == 0.25
    assert distance([0.0, 0.0, 0.0], [0.0, 0.0, 1e-3]) == 1e-3
    assert distance("ab", "ab") == 0.0
    assert distance("ab", "ac") == distance("ab", [1.0]) == float("inf")
    assert distance([3.0, 1.0], [3.0, 1.0, -1.0]) == float("inf")
    assert distance([float("nan")], [1.0]) == distance([1.0], [float("nan")]) == float("inf")
    expected = {"a": [1.0], "b": [2.0]}
    assert worst_distance({**expected, "b": [float("nan")]}, expected) == ("b", float("inf"))
    assert worst_distance(expected, {"a": [1.0], "b": [2.5]}) == ("b", 0.25)
    assert worst_distance(expected, {"a": [1.0]}) == ("b", float("inf"))
    assert worst_distance(expected, {**expected, "c": [1.0]}) == ("c", float("inf"))
    assert worst_distance({}, {}) == ("", 0.0)
