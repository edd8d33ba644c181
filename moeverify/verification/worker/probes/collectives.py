"""Probes of collectives, run on all ranks of a job. Each tries an operation with a known bug somewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from moeverify.results.probe import Answer, ProbeOutcome
from moeverify.verification.launch.runner import RankContext

_PREMUL_SUM = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009 - exported, and not declared


def _agree(is_right: bool) -> bool:
    """Return whether the condition holds on every rank. Collective."""
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, is_right)
    return all(answers)


def _attempt(work: Callable[[], Tensor], expected: Tensor) -> Answer:
    """Return whether `work` returns the expected tensor on every rank, or the error that it raised."""
    try:
        actual = work()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return Answer(outcome=ProbeOutcome.REFUSED, error=str(error).strip().splitlines()[0])
    return Answer(outcome=ProbeOutcome.RIGHT if _agree(torch.equal(actual, expected)) else ProbeOutcome.WRONG)


def _join(by_dtype: Mapping[torch.dtype, Answer]) -> Answer:
    """Return one answer for several dtypes, with the dtypes that fail."""
    named = {str(dtype).removeprefix("torch."): answer for dtype, answer in by_dtype.items()}
    wrong = tuple(
        f"{name} {answer.error or answer.outcome}"
        for name, answer in named.items()
        if answer.outcome is not ProbeOutcome.RIGHT
    )
    return Answer(
        outcome=ProbeOutcome.WRONG if wrong else ProbeOutcome.RIGHT, found=tuple(named), wrong=wrong
    )


def probe_sums(context: RankContext) -> Answer:
    """All-reduce contiguous tensors of every dtype in use."""
    answers = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        mine = torch.arange(24, device=context.device).to(dtype) + context.rank

        def total(mine: Tensor = mine) -> Tensor:
            dist.all_reduce(mine)
            return mine

        base = torch.arange(24, device=context.device).to(dtype)
        answers[dtype] = _attempt(total, base + base + 1)
    return _join(answers)


def probe_average(context: RankContext) -> Answer:
    """Average with reduce-scatter, as FSDP2 does."""
    mine = torch.arange(4.0, device=context.device) + 2 * context.rank
    part = torch.empty(2, device=context.device)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def average() -> Tensor:
        scatter(part, mine, op=dist.ReduceOp.AVG)
        return part

    expected = torch.arange(4.0, device=context.device).chunk(2)[context.rank] + 1
    answer = _attempt(average, expected)
    if answer.outcome is not ProbeOutcome.RIGHT and _agree(torch.equal(part, 2 * expected)):
        return Answer(outcome=ProbeOutcome.SUM)
    return answer


def probe_all_to_all(context: RankContext) -> Answer:
    """Exchange parts of different sizes, one of them empty, as expert parallelism does."""
    rank, answers = context.rank, {}
    sends, receives = ([3, 1], [3, 0]) if rank == 0 else ([0, 2], [1, 2])
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        mine = (torch.arange(sum(sends), device=context.device) + 10 * rank).to(dtype)
        out = torch.empty(sum(receives), dtype=dtype, device=context.device)

        def exchange(out: Tensor = out, mine: Tensor = mine) -> Tensor:
            dist.all_to_all_single(out, mine, receives, sends)
            return out

        expected = torch.tensor([0, 1, 2] if rank == 0 else [3, 10, 11], device=context.device).to(dtype)
        answers[dtype] = _attempt(exchange, expected)
    return _join(answers)


def probe_strided(context: RankContext) -> Answer:
    """All-reduce a view of every other element."""
    mine = torch.arange(8.0, device=context.device)
    view = mine[::2]
    expected = torch.arange(8.0, device=context.device)
    expected[::2] *= 2

    def total() -> Tensor:
        dist.all_reduce(view)
        return mine

    return _attempt(total, expected)


def probe_layouts(context: RankContext) -> Answer:
    """All-reduce a gradient that is row-major on one rank and column-major on the other."""
    values = torch.arange(6.0, device=context.device).view(2, 3)
    mine = values.clone() if context.rank == 0 else values.t().contiguous().t()

    def total() -> Tensor:
        dist.all_reduce(mine)
        return mine

    return _attempt(total, 2 * values)


def probe_scatter_layouts(context: RankContext) -> Answer:
    """Reduce-scatter a 4-d tensor in channels-last memory format, as gradients on a GPU may have."""
    values = torch.arange(48.0, device=context.device).view(4, 3, 2, 2) * (1 + context.rank)
    part = torch.empty(2, 3, 2, 2, device=context.device)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def total() -> Tensor:
        scatter(part, values.to(memory_format=torch.channels_last))
        return part

    expected = 3 * torch.arange(48.0, device=context.device).view(4, 3, 2, 2).chunk(2)[context.rank]
    return _attempt(total, expected)


def probe_gather_backward(context: RankContext) -> Answer:
    """Differentiate an all-gather whose results are used transposed."""
    mine = torch.zeros(2, 3, requires_grad=True)
    weight = torch.arange(6.0).view(3, 2)

    def gradient() -> Tensor:
        parts = all_gather(mine)  # type: ignore[no-untyped-call]
        terms = [(part.t() * (weight + 10 * index)).sum() for index, part in enumerate(parts)]
        gradients: tuple[Tensor, ...] = torch.autograd.grad(terms, mine)
        return gradients[0]

    return _attempt(gradient, 2 * (weight + 10 * context.rank).t())


def probe_premultiplied(context: RankContext) -> Answer:
    """All-reduce with a factor, which FSDP2 uses for a custom divisor."""
    mine = torch.ones(4, device=context.device)

    def total() -> Tensor:
        dist.all_reduce(mine, op=_PREMUL_SUM(0.25))
        return mine

    return _attempt(total, torch.full((4,), 0.5, device=context.device))
