"""Probes of collectives, on all ranks of a job; each tries what is known to go wrong somewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from moeverify.launch.runner import RankContext
from moeverify.results.probe import Answer

_PREMUL_SUM = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009 - exported, and not declared
_OWN = "moeverify's own collectives check for contiguity; "


def _agree(is_right: bool) -> bool:
    """Return whether it is so on every rank."""
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, is_right)
    return all(answers)


def _attempt(work: Callable[[], Tensor], expected: Tensor) -> str:
    """Return `right`, `wrong`, or what was raised."""
    try:
        actual = work()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
    return "right" if _agree(torch.equal(actual, expected)) else "wrong"


def _judge_order(answer: str, what: str, wrong: Answer) -> Answer:
    """Return what an attempt says of tensors that do not lie in memory in the order of their dims."""
    if answer == "right":
        return Answer("right", "")
    if answer != "wrong":
        return Answer(f"refused: {answer}", f"a {what} is an error, never a wrong number")
    return wrong


def probe_sums(context: RankContext) -> Answer:
    """Sum contiguous tensors of every dtype that is used."""
    wrong = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        mine = torch.arange(24, device=context.device).to(dtype) + context.rank

        def total(mine: Tensor = mine) -> Tensor:
            dist.all_reduce(mine)
            return mine

        base = torch.arange(24, device=context.device).to(dtype)
        answer = _attempt(total, base + base + 1)
        if answer != "right":
            wrong.append(f"{str(dtype).removeprefix('torch.')} {answer}")
    if wrong:
        return Answer(f"all_reduce: {', '.join(wrong)}", "no verdict can be trusted here", "fail")
    return Answer("all_reduce right in float64, float32, bfloat16, int64", "the layouts stand on it")


def probe_average(context: RankContext) -> Answer:
    """Average by reduce_scatter, as FSDP2 does."""
    mine = torch.arange(4.0, device=context.device) + 2 * context.rank
    part = torch.empty(2, device=context.device)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def average() -> Tensor:
        scatter(part, mine, op=dist.ReduceOp.AVG)
        return part

    expected = torch.arange(4.0, device=context.device).chunk(2)[context.rank] + 1
    answer = _attempt(average, expected)
    if answer == "right":
        return Answer("right", "FSDP1 and FSDP2 average with it")
    summed = _agree(torch.equal(part, 2 * expected))
    found = "returns the sum" if summed else answer
    meaning = "every fsdp layout differs from its golden, and it is not the layout's fault (pytorch #162338)"
    return Answer(found, meaning, "fail")


def probe_all_to_all(context: RankContext) -> Answer:
    """Exchange parts of different sizes, one of them empty, as expert parallelism does."""
    rank, wrong = context.rank, []
    sends, receives = ([3, 1], [3, 0]) if rank == 0 else ([0, 2], [1, 2])
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        mine = (torch.arange(sum(sends), device=context.device) + 10 * rank).to(dtype)
        out = torch.empty(sum(receives), dtype=dtype, device=context.device)

        def exchange(out: Tensor = out, mine: Tensor = mine) -> Tensor:
            dist.all_to_all_single(out, mine, receives, sends)
            return out

        expected = torch.tensor([0, 1, 2] if rank == 0 else [3, 10, 11], device=context.device).to(dtype)
        answer = _attempt(exchange, expected)
        if answer != "right":
            wrong.append(f"{str(dtype).removeprefix('torch.')} {answer}")
    if wrong:
        return Answer(", ".join(wrong), "layouts with ep cannot be verified here", "fail")
    return Answer("right in float64, bfloat16, int64", "tokens of expert parallelism travel by it")


def probe_strided(context: RankContext) -> Answer:
    """Sum a view of every other element."""
    mine = torch.arange(8.0, device=context.device)
    view = mine[::2]
    expected = torch.arange(8.0, device=context.device)
    expected[::2] *= 2

    def total() -> Tensor:
        dist.all_reduce(view)
        return mine

    meaning = f"{_OWN}a user's code that reduces a strided tensor gets wrong numbers (pytorch #192920)"
    found = Answer("sums other elements than the view's", meaning, "warn")
    return _judge_order(_attempt(total, expected), "strided tensor", found)


def probe_layouts(context: RankContext) -> Answer:
    """Sum a gradient that has its rows in memory on one rank and its columns on the other."""
    values = torch.arange(6.0, device=context.device).view(2, 3)
    mine = values.clone() if context.rank == 0 else values.t().contiguous().t()

    def total() -> Tensor:
        dist.all_reduce(mine)
        return mine

    meaning = f"{_OWN}a user's hook that reduces gradients as they come may add wrong elements"
    found = Answer("sums in the order of memory", meaning, "warn")
    return _judge_order(_attempt(total, 2 * values), "permuted gradient", found)


def probe_scatter_layouts(context: RankContext) -> Answer:
    """Sum and scatter a 4-d tensor whose channels lie last in memory, as a gradient on a GPU may come."""
    values = torch.arange(48.0, device=context.device).view(4, 3, 2, 2) * (1 + context.rank)
    part = torch.empty(2, 3, 2, 2, device=context.device)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def total() -> Tensor:
        scatter(part, values.to(memory_format=torch.channels_last))
        return part

    expected = 3 * torch.arange(48.0, device=context.device).view(4, 3, 2, 2).chunk(2)[context.rank]
    meaning = f"{_OWN}a user's code that reduces gradients as they come gets elements in another order"
    found = Answer("scatters in the order of memory", meaning, "warn")
    return _judge_order(_attempt(total, expected), "permuted gradient", found)


def probe_gather_backward(context: RankContext) -> Answer:
    """Differentiate a gather whose results are used transposed."""
    mine = torch.zeros(2, 3, requires_grad=True)
    weight = torch.arange(6.0).view(3, 2)

    def gradient() -> Tensor:
        parts = all_gather(mine)  # type: ignore[no-untyped-call]
        terms = [(part.t() * (weight + 10 * index)).sum() for index, part in enumerate(parts)]
        gradients: tuple[Tensor, ...] = torch.autograd.grad(terms, mine)
        return gradients[0]

    answer = _attempt(gradient, 2 * (weight + 10 * context.rank).t())
    if answer == "right":
        return Answer("right", "")
    meaning = "moeverify does not use it; a user's torch.distributed.nn.functional.all_gather gives a wrong gradient"
    return Answer(f"gradient {answer}" if answer == "wrong" else answer, meaning, "warn")


def probe_premultiplied(context: RankContext) -> Answer:
    """Sum with a factor, which FSDP2 uses for a divisor of its own."""
    mine = torch.ones(4, device=context.device)

    def total() -> Tensor:
        dist.all_reduce(mine, op=_PREMUL_SUM(0.25))
        return mine

    answer = _attempt(total, torch.full((4,), 0.5, device=context.device))
    if answer == "right":
        return Answer("right", "FSDP2's set_gradient_divide_factor uses it")
    meaning = (
        "FSDP2's set_gradient_divide_factor needs set_force_sum_reduction_for_comms(True), as moeverify does"
    )
    return Answer("not supported" if answer != "wrong" else "wrong", meaning, "warn")
