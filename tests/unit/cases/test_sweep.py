"""`--sweep`: one case for each combination of values."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.cases.validation.sweep import load_sweep
from moeverify.errors import CaseError

CASE = Path(__file__).parents[3] / "cases" / "ep2.yaml"


def test_every_combination_is_a_case_named_by_its_values() -> None:
    found = load_sweep([CASE], ["layout.micro_batches=1,2", "recipe.data.seq_len=16, 32"])
    assert [case.name for combination in found for case in combination.cases] == [
        "ep2 micro_batches=1 seq_len=16",
        "ep2 micro_batches=1 seq_len=32",
        "ep2 micro_batches=2 seq_len=16",
        "ep2 micro_batches=2 seq_len=32",
    ]
    (last,) = found[-1].cases
    assert (last.layout.micro_batches, last.recipe.data.seq_len) == (2, 32)


def test_without_a_sweep_there_are_the_cases_as_they_are() -> None:
    (only,) = load_sweep([CASE], [], overrides=["layout.micro_batches=2"])
    assert [(case.name, case.layout.micro_batches) for case in only.cases] == [("ep2", 2)]


def test_a_list_is_one_value() -> None:
    blocks = [list(range(8)), list(range(8, 16))]
    found = load_sweep([CASE], [f"layout.placement={blocks},{blocks[::-1]}"])
    assert [combination.values["layout.placement"] for combination in found] == [
        str(blocks),
        str(blocks[::-1]),
    ]


def test_what_a_case_does_not_allow_is_refused_and_the_rest_kept() -> None:
    kept, refused = load_sweep([CASE], ["layout.ep=2,3"])
    assert len(kept.cases) == 1
    assert not refused.cases
    assert "ep" in refused.refused


@pytest.mark.parametrize(
    ("sweeps", "said"),
    [
        (["layout.ep=3,5"], "layout.ep"),
        (["layout.ep=1,"], "expected `path=value,value`"),
        (["layout.ep=1", "layout.ep=2"], "`layout.ep` is swept twice"),
        (["layout.nothing=1,2"], "there is no such field"),
        ([f"recipe.seed={','.join(map(str, range(1001)))}"], "1001 combinations"),
    ],
)
def test_a_bad_sweep_is_an_error(sweeps: list[str], said: str) -> None:
    with pytest.raises(CaseError, match=said):
        load_sweep([CASE], sweeps)
