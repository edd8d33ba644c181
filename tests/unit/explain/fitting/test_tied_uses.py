"""Contributions of a tied weight's uses: lost, counted differently, or not summed on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor
from wrong_tensors import draw, examine, find_hypothesis, make_components, make_inputs, make_tensor

from moeverify.cases.axes.groups import TIED_USES
from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.hypotheses.base import Outcome
from moeverify.explain.fitting.wrong_tensor import RankShard
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.factor import Source
from moeverify.results.operation import Scaled, Unreduced

NAME = "embed.weight"
USES = {"embedding": {NAME: draw(6, 4)}, "head": {NAME: draw(6, 4, seed=1)}}
LOOKED_UP, OF_HEAD = (USES[use][NAME] for use in ("embedding", "head"))
WHOLE = LOOKED_UP + OF_HEAD
AXES = Axes({}, [Source(name=TIED_USES, size=2)])


def ask(*copies: Tensor, on_one_rank: bool = False) -> Outcome:
    tensor = make_tensor(WHOLE, *copies, name=NAME)
    if on_one_rank:
        shards = tuple(RankShard(0, Region.whole(WHOLE.shape), copy) for copy in copies)
        tensor = replace(tensor, shards=shards)
    components = replace(make_components(names=(NAME,)), by_use=lambda: USES)
    return examine("tied_uses", tensor, make_inputs(tensor, axes=AXES, components=components))


@pytest.mark.parametrize(("weights", "factor"), [((1.0, 0.0), 0.0), ((1.0, 2.0), 2.0), ((1.0, 0.5), 0.5)])
def test_a_use_that_counts_otherwise_is_named(weights: tuple[float, float], factor: float) -> None:
    wrong = weights[0] * LOOKED_UP + weights[1] * OF_HEAD
    outcome = ask(wrong, wrong)
    operation = outcome.explanation.operation
    assert isinstance(operation, Scaled)
    ((part, found),) = ((each.part, each.factor) for each in operation.contributions)
    assert (part.use, found.value) == ("head", factor)
    assert outcome.explanation.cause is (Cause.TERM_SCALE if factor else Cause.MISSING_REDUCTION)


def test_copies_on_one_rank_that_were_not_added_up() -> None:
    operation = ask(LOOKED_UP, OF_HEAD, on_one_rank=True).explanation.operation
    assert isinstance(operation, Unreduced)
    assert (operation.num_replicas, operation.axes[0].times) == (2, (TIED_USES,))


@pytest.mark.parametrize(
    ("copy", "use", "factor"), [(OF_HEAD, "embedding", 0.0), (LOOKED_UP + 2.0 * OF_HEAD, "head", 2.0)]
)
def test_a_copy_that_did_not_get_the_sum_is_named_beside_one_that_did(
    copy: Tensor, use: str, factor: float
) -> None:
    for copies in ((WHOLE, copy), (copy, WHOLE)):
        operation = ask(*copies, on_one_rank=True).explanation.operation
        assert isinstance(operation, Scaled)
        assert [(each.part.use, each.factor.value) for each in operation.contributions] == [(use, factor)]


@pytest.mark.parametrize(
    "copies",
    [(LOOKED_UP, 2.0 * OF_HEAD), (LOOKED_UP, OF_HEAD, WHOLE), (draw(6, 4, seed=2), draw(6, 4, seed=2))],
)
def test_copies_that_are_something_else_explain_nothing(copies: tuple[Tensor, Tensor]) -> None:
    assert ask(*copies, on_one_rank=True).explanation is None


def test_weights_of_one_use_are_not_asked() -> None:
    tensor = make_tensor(WHOLE, LOOKED_UP, name=NAME)
    axes = Axes({}, [Source(name=TIED_USES, size=2)], lambda axis, name: False)
    assert not find_hypothesis("tied_uses").applies(tensor, make_inputs(tensor, axes=axes))
