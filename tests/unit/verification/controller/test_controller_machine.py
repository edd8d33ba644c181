"""Properties of a machine, and whether a stored golden matches the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moeverify.report.words.note import describe_limit
from moeverify.verification.controller import machine
from moeverify.verification.controller.machine import find_limit, golden_code

ROOT = Path(machine.__file__).parents[2]


def change(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Change the content of one project file."""
    assert (ROOT / place).is_file()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == ROOT / place))


@pytest.mark.parametrize(
    "place",
    [
        "model/router.py",
        "train/loop.py",
        "verification/golden/store.py",
        "verification/compare/difference.py",
        "verification/golden_run/update_noise.py",
        "verification/golden_run/golden.py",
        "hashing.py",
    ],
)
def test_a_golden_of_other_code_is_another_golden(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = golden_code()
    assert golden_code() == before
    change(monkeypatch, place)
    assert golden_code() != before


@pytest.mark.parametrize(
    "place", ["verification/checks/bounds.py", "verification/checks/trace.py", "report/words/check.py"]
)
def test_what_only_judges_does_not_make_goldens_anew(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    before = golden_code()
    change(monkeypatch, place)
    assert golden_code() == before


def test_an_optional_check_has_its_code_in_the_goldens_that_hold_what_it_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, asking = golden_code(), golden_code(["trace"])
    assert plain != asking
    change(monkeypatch, "verification/checks/trace.py")
    assert golden_code() == plain
    assert golden_code(["trace"]) != asking


@pytest.mark.slow
def test_what_makes_goldens_is_among_the_code_that_they_depend_on() -> None:
    """Modules that a golden depends on are hashed, except those that parallelize, judge or read cases.

    Of the checks those are hashed whose notes on one device a golden holds.
    """
    sys.path.insert(0, str(ROOT.parent / "tests" / "arch"))
    from house import House

    house = House.read(ROOT.parent)
    left = [name for name in house.sources if name.startswith("moeverify.verification.golden_run")]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += [found.target for found in house.imports[name] if found.target in house.sources]
    others = {
        "cases",
        "cases.axes",
        "errors",
        "explain",  # knows random operators, whose lines are named where a model is refused
        "checksum",
        "gc_pause",  # pauses of the garbage collector change no value
        "input_file",
        "json_file",
        "parallel",
        "results",
        "stale_folders",
        "tools.placement",  # of experts on ranks: one device has them all
        "train.calls",  # records the calls of a user's own step
        "verification.checks",
        "verification.collectives",
        ".",
    }
    known = {part.removesuffix(".py").replace("/", ".") for part in machine._GOLDEN_CODE}
    packages = {house.sources[name].package for name in seen}
    assert packages - others == {name for name in known if not name.startswith("verification.checks.")}
    assert {f"moeverify.{name}" for name in known if name.startswith("verification.checks.")} <= seen


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_available_memory", lambda: 3 * 2**30)
    limit = find_limit("cpu")
    assert (limit.most, limit.by) == (4, "memory")
    assert describe_limit(limit) == "3.0 GiB of memory is free, and a rank needs about 0.7"
    assert find_limit("cpu", 9) == limit
    assert describe_limit(find_limit("cpu", 2)) == "--ranks 2"
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    assert describe_limit(find_limit("cpu")) == "torchrun started 3 ranks"
