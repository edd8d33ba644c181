"""Parts of a model that a layout must have sharded."""

from __future__ import annotations

from typing import Any

import pytest

from moeverify.cases.axes.claims import axis_claims
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.schema import Case
from moeverify.faults.setting import make_case


def claims_of(**layout: Any) -> dict[str, str]:
    case = make_case("a", **layout)
    return {axis: claim.part for axis, claim in axis_claims(case, MeshPlan.of(case.layout)).items()}


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (
            {"dp_shard": 4, "ep": 2},
            {"dp_shard": "all", "fsdp": "others", "ep": "experts", "efsdp": "experts"},
        ),
        ({"tp": 2}, {"tp": "others", "etp": "experts"}),
        ({"tp": 4, "etp": 1}, {"tp": "others"}),
        ({"tp": 4, "ep": 2}, {"tp": "others", "ep": "experts"}),  # copies of an expert on ranks of tp
        ({"tp": 4, "ep": 2, "etp": 2}, {"tp": "others", "ep": "experts", "etp": "experts"}),
        ({"dp_replicate": 2, "ep": 2, "data_parallel": "ddp"}, {"dp_replicate": "all", "ep": "experts"}),
    ],
)
def test_experts_and_the_rest_are_claimed_apart(layout: dict[str, Any], parts: dict[str, str]) -> None:
    assert claims_of(**layout) == parts


@pytest.mark.parametrize("loss", [None, "mine:loss"])
@pytest.mark.parametrize("step", [None, "mine:step"])
def test_rows_are_claimed_by_losses_of_tokens_only_where_these_are_shown(
    loss: str | None, step: str | None
) -> None:
    model = {"factory": "mine:make", "loss": loss, "vocab_size": 16}
    layout = {"dp_shard": 2, "parallelize": "mine:parallelize"}
    recipe = {"name": "mine", "model": model, "step": step}
    case = Case.model_validate({"name": "mine", "recipe": recipe, "layout": layout})
    claims = axis_claims(case, MeshPlan.of(case.layout))
    assert ("dp_shard" in claims) == (loss is None and step is None)
