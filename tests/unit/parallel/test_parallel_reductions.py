"""Reductions after the backward pass: their parameters, ranks and divisors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeverify.cases.schema import Case
from moeverify.parallel import plan
from moeverify.parallel.gradients import Reduction, add_shared, finalize_gradients

Listed = set[tuple[str, tuple[int, ...], float]]  # (part of the model, ranks of the group, divisor)


@contextmanager
def reductions_of(case: Case, as_rank: Callable[[Case, int], Any], monkeypatch: Any) -> Iterator[Listed]:
    """Return the reductions that the finalization of rank 0 would make."""
    seen: list[Reduction] = []

    def note(parameters: Any, reductions: Any) -> None:
        seen.extend(reductions)

    monkeypatch.setattr(plan, "finalize_gradients", note)
    with as_rank(case, 0) as model:
        model.done.finalize()
        names = {id(shard.tensor): shard.name for shard in model.done.shards}
        yield {
            (_part(names[id(parameter)]), _ranks(reduction.group), reduction.divisor)
            for reduction in seen
            for parameter in reduction.parameters
        }


def _ranks(group: Any) -> tuple[int, ...]:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _part(name: str) -> str:
    """Return the part that a parameter belongs to: `experts`, `router`, `q_norm` ..."""
    parts = [part for part in name.split(".") if part not in ("layers", "weight", "bias", "moe", "attention")]
    return next(part for part in parts if not part.isdigit())


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"dp_shard": 2}, set()),
        ({"dp_shard": 4, "ep": 2}, set()),  # FSDP2 receives the divisor
        ({"dp_shard": 2, "ep": 2}, {("experts", (), 2.0)}),  # nobody shares them: FSDP2 does not wrap them
        ({"dp_replicate": 2, "data_parallel": "ddp"}, set()),
        ({"dp_replicate": 4, "ep": 2, "data_parallel": "ddp"}, {("experts", (0, 2), 4.0)}),
        (
            {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
            {("experts", (), 2.0)},
        ),  # FSDP2 averages over the 2 copies
    ],
)
def test_experts(
    layout: dict[str, Any], expected: Listed, make: Any, as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reductions_of(make(**layout), as_rank, monkeypatch) as found:
        assert found == expected


def test_under_tensor_parallelism_norms_of_heads_are_summed(
    make: Any, as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reductions_of(make(tp=2), as_rank, monkeypatch) as found:
        assert {part for part, _, _ in found} >= {"q_norm", "k_norm"}
        assert {(ranks, divisor) for _, ranks, divisor in found} == {((0, 1), 1.0)}


def test_under_sequence_parallelism_norms_of_the_stream_too(
    make: Any, as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = {"attention_norm", "ffn_norm", "norm"}
    with reductions_of(make(tp=2), as_rank, monkeypatch) as without:
        assert not {part for part, _, _ in without} & stream
    with reductions_of(make(tp=2, sequence_parallel=True), as_rank, monkeypatch) as found:
        assert {part for part, _, _ in found} >= stream


def test_routers_are_summed_where_each_sees_a_slice_of_the_tokens(
    make: Any, as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reductions_of(make(tp=2), as_rank, monkeypatch) as alike:
        assert "router" not in {part for part, _, _ in alike}
    with reductions_of(make(dp_shard=2, tp=2, ep=2), as_rank, monkeypatch) as sliced:
        assert ("router", (0, 1), 1.0) in sliced


def test_a_reduction_without_a_group_divides_alone() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([2.0, 4.0, 6.0])
    untouched = nn.Parameter(torch.ones(3))  # has no gradient
    finalize_gradients([parameter, untouched], [Reduction([parameter, untouched], None, 2.0)])
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
    assert untouched.grad is None


def test_a_strided_gradient_is_reduced_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    whole = torch.arange(6.0).reshape(2, 3)
    parameter.grad = whole.t()
    finalize_gradients([], [Reduction([parameter], None, 2.0)])
    assert parameter.grad.data_ptr() == whole.data_ptr()
    assert whole.tolist() == [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]]


def test_two_copies_on_one_rank_get_the_sum_of_their_gradients() -> None:
    copies: list[Tensor] = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    copies[0].grad, copies[1].grad = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    add_shared(*copies)
    assert [copy.grad.tolist() for copy in copies if copy.grad is not None] == [[11.0, 22.0]] * 2
