"""Routing that is reported of another micro-batch, and routing that is reported wrong while its block is right."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from wrong_tensors import AXES, examine, make_inputs

from moeverify.diagnose.first_divergence import Search
from moeverify.diagnose.hypotheses.base import Outcome
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.operation import Moved

ROUTER = "layers.1.moe.router"
ROWS = ((range(2), range(4)), (range(2, 4), range(4)))
IDS = torch.arange(4 * 4 * 2, dtype=torch.float64).reshape(4, 4, 2) % 7


def report(*parts: Tensor) -> WrongTensor:
    """Return the choice of experts of one rank, which reports it for each micro-batch."""
    shards = [
        RankShard(0, Region.box(IDS.shape, (rows, positions, range(2))), part)
        for (rows, positions), part in zip(ROWS, parts, strict=True)
    ]
    return WrongTensor((0, "router_ids", ROUTER), IDS, tuple(shards))


def ask(tensor: WrongTensor, micro_batches: object = ROWS) -> Outcome:
    return examine("other_micro_batch", tensor, make_inputs(tensor, micro_batches={0: micro_batches}))


def test_the_choice_of_the_last_micro_batch_is_reported_for_all() -> None:
    explanation = ask(report(IDS[2:], IDS[2:])).explanation
    assert explanation.operation == Moved(unit="micro-batch", moves=((0, 1),), num_moves=1)
    assert explanation.cause is Cause.METRIC


def test_a_choice_that_is_that_of_no_micro_batch_is_refused() -> None:
    changed = IDS[2:].clone()
    changed[0, 0, 0] += 1
    assert ask(report(changed, IDS[2:])).explanation is None
    assert ask(report(IDS[2:], IDS[2:]), ROWS[:1]).explanation is None


def make_search(matched: frozenset[str]) -> Search:
    counts = {"forward": 1, "backward": 1}
    return Search({}, counts, dict.fromkeys(counts, 0.0), 1e-9, matched)


def test_a_choice_is_reported_wrong_where_its_block_puts_out_what_it_should() -> None:
    tensor = report(IDS[:2] + 1, IDS[2:])
    inputs = replace(make_inputs(tensor), search=make_search(frozenset({"layers.1.moe"})))
    assert examine("altered", tensor, inputs).explanation.cause is Cause.METRIC
    elsewhere = replace(inputs, search=make_search(frozenset({"layers.2.moe"})), axes=AXES)
    assert examine("altered", tensor, elsewhere).explanation.cause is Cause.ROUTING
