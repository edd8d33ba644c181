"""Each layer is on the pipeline rank that has its stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeverify.cases.validation.load import build_case
from moeverify.report.words.check import describe_facts
from moeverify.results.checks import Kind
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.placed import find_elsewhere, list_owners
from moeverify.verification.compare.assembled import Assembled
from moeverify.verification.compare.comparison import ComparedShard

VIRTUAL = {"pp": 2, "micro_batches": 4, "pipeline_schedule": "interleaved_1f1b"}


def make_case(num_layers: int, **layout: Any) -> Any:
    recipe = {"model": {"preset": "stress", "num_layers": num_layers}, "data": {"batch": 8}}
    return build_case({"name": "c", "recipe": recipe, "layout": layout})


def list_wrong(case: Any, *holders: Sequence[int], step: int = -1) -> list[tuple[Any, ...]]:
    """Return the findings when these ranks have each layer; the embedding and the head do not matter."""
    tensors = {}
    for name, ranks in [("embed", (0,)), *((f"layers.{n}", each) for n, each in enumerate(holders))]:
        tensor = Assembled((step, Kind.INITIAL_WEIGHT, f"{name}.norm.weight"))
        tensor.shards += [(rank, cast(ComparedShard, SimpleNamespace(region="whole"))) for rank in ranks]
        tensors[tensor.key] = tensor
    shown = ShownTensors({}, tensors, cast(Any, None), case=case, golden_names={})
    found = list(find_elsewhere(shown))
    assert all("than their pipeline stage" in describe_facts(each.facts, each).cause for each in found)
    return [(each.facts.modules, each.ranks) for each in found]


@pytest.mark.parametrize(
    ("layout", "owners"),
    [
        ({"pp": 2, "micro_batches": 2}, [0, 0, 1, 1]),
        ({"pp": 2, "micro_batches": 2, "stage_layers": [1, 3]}, [0, 1, 1, 1]),
        (VIRTUAL, [0, 1, 0, 1]),
        ({**VIRTUAL, "pipeline_schedule": "zbv"}, [0, 1, 1, 0]),
        ({**VIRTUAL, "stage_layers": [0, 2, 1, 1]}, [1, 1, 0, 1]),
    ],
)
def test_layers_belong_where_their_stages_are(layout: dict[str, Any], owners: list[int]) -> None:
    case = make_case(4, **layout)
    assert list_owners(case.layout, 4) == owners
    assert list_wrong(case, *((rank,) for rank in owners)) == []
    ((modules, ranks),) = list_wrong(case, *((1 - rank,) for rank in owners))
    assert (modules, ranks) == (tuple(f"layers.{n}" for n in range(4)), (0, 1))


def test_two_layers_that_trade_places_are_named_and_the_others_are_not() -> None:
    case = make_case(4, pp=4, micro_batches=4)
    assert list_wrong(case, (0,), (1,), (2,), (3,)) == []
    assert list_wrong(case, (0,), (2,), (1,), (3,)) == [(("layers.1", "layers.2"), (1, 2))]


def test_one_pipeline_of_several_is_enough() -> None:
    case = make_case(2, pp=2, dp_shard=2, micro_batches=2)
    assert list_wrong(case, (0, 1), (2, 3)) == []
    assert list_wrong(case, (0, 3), (2, 1)) == [(("layers.0", "layers.1"), (1, 3))]


@pytest.mark.parametrize("holders", [[(0, 1), (1,)], [(), (1,)]])
def test_what_is_missing_or_repeated_is_for_others_to_say(holders: Any) -> None:
    assert list_wrong(make_case(2, pp=2, micro_batches=2), *holders) == []


def test_what_is_shown_later_and_layouts_without_stages_are_left_out() -> None:
    assert list_wrong(make_case(2, pp=2, micro_batches=2), (1,), (0,), step=0) == []
    assert list_wrong(make_case(2, dp_shard=2), (1,), (0,)) == []
