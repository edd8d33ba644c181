"""What a machine offers, and when a stored golden is still that of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.controller import machine
from moeverify.controller.machine import answer_version

ROOT = Path(machine.__file__).parents[1]


@pytest.mark.parametrize(
    "place",
    [
        "model/router.py",
        "train/loop.py",
        "golden/store.py",
        "compare/difference.py",
        "worker/propagation.py",
        "worker/golden.py",
    ],
)
def test_a_golden_of_other_code_is_another_golden(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer_version()
    assert answer_version() == before
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == ROOT / place))
    assert answer_version() != before


def test_what_only_judges_does_not_make_goldens_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer_version()
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"#" * (path == ROOT / "compare/bounds.py")
    )
    assert answer_version() == before
