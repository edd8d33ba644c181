"""How the gradient of a tensor inside of a formula may come back otherwise, spelled once for all formulas.

The true gradient is a sum of products, one for each way through the formula, and a backward pass that is written by
hand has its mistakes in one of them. So a formula names the tensors that it is made of, and the gradient of each may
be missing, be there twice, be taken of other elements, of other tokens, as a mean or in a narrower dtype, or be
multiplied by a tensor of the formula once too often or too seldom.

Letters: b rows and s tokens of one call of a module, W the last dim of a tensor inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from moeverify.results.change import Change

GRADIENT_OF = "gradient-of"
_TIMES: Mapping[str, float] = {"none": 0.0, "opposite": -1.0, "twice": 2.0}
_POWERS = (-1, 1, -2, 2)
_MOST_PARTS = 8
Operands = Mapping[str, Tensor]
"""Tensors of a formula by which a gradient may be multiplied once too often, each broadcast to the gradient."""

_INSIDE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(-1, keepdim=True).expand_as(x),
    "summed": lambda x: x.sum(-1, keepdim=True).expand_as(x),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "first-element": lambda x: x[..., :1].expand_as(x),
    "next-element": lambda x: x.roll(-1, -1),
    "element-before": lambda x: x.roll(1, -1),
    "reversed": lambda x: x.flip(-1),
    "positive": lambda x: x.clamp(min=0.0),
    "sign": torch.sign,
    "of-unit-length": lambda x: torch.nn.functional.normalize(x, dim=-1),
    "bfloat16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "float16": lambda x: x.to(torch.float16).to(x.dtype),
    "float32": lambda x: x.to(torch.float32).to(x.dtype),
}
"""Of the elements of one token."""


def _turn_blocks(x: Tensor) -> Tensor:
    """Return x with rows and columns exchanged in each block of W tokens, as rows that are read by columns.

    Not a number where the tokens are no whole number of blocks.
    """
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    if len(flat) % width:
        return x * torch.nan
    return flat.view(-1, width, width).transpose(1, 2).reshape(x.shape)


_OVER_TOKENS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "next-position": lambda x: x.roll(-1, 1),
    "position-before": lambda x: x.roll(1, 1),
    "next-row": lambda x: x.roll(-1, 0),
    "row-before": lambda x: x.roll(1, 0),
    "first-position": lambda x: x[:, :1].expand_as(x),
    "first-row": lambda x: x[:1].expand_as(x),
    "first-token": lambda x: x[:1, :1].expand_as(x),
    "over-positions": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "over-rows": lambda x: x.mean(0, keepdim=True).expand_as(x),
    "over-tokens": lambda x: x.mean((0, 1), keepdim=True).expand_as(x),
    "summed-over-positions": lambda x: x.sum(1, keepdim=True).expand_as(x),
    "summed-over-rows": lambda x: x.sum(0, keepdim=True).expand_as(x),
    "summed-over-tokens": lambda x: x.sum((0, 1), keepdim=True).expand_as(x),
    "positions-reversed": lambda x: x.flip(1),
    "across": _turn_blocks,
}
"""Of the tokens (b, s, ..., W) of one call."""

_OF_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "next-head": lambda x: x.roll(-1, 1),
    "head-before": lambda x: x.roll(1, 1),
    "over-heads": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "next-query": lambda x: x.roll(-1, 2),
    "query-before": lambda x: x.roll(1, 2),
    "over-queries": lambda x: x.mean(2, keepdim=True).expand_as(x),
    "turned": lambda x: x.transpose(-2, -1) if x.shape[-1] == x.shape[-2] else x * torch.nan,
}
"""Of the scores of attention (b, N heads, s queries, S keys), and of what is summed over keys (b, N, s, 1)."""

_OF_GROUPS = ("first-of-group", "last-of-group")
"""Of keys or values as each query head reads them (b, S, N heads, D), in groups of heads that read one."""


_WITHOUT_NUMBER = {**_INSIDE, **_OVER_TOKENS, **_OF_SCORES}


def list_edge_ways(
    *edges: str,
    width: int = 0,
    operands: Iterable[str] = (),
    over_tokens: bool = True,
    has_width: bool = True,
) -> list[Change]:
    """Return how the gradient of each of some tensors inside of a formula may come back otherwise, the simple first.

    `width` is that of the last dim, where there are parts of it; `operands` name what may multiply. Without
    `has_width` each is one number for a token.
    """
    found = [Change(part=GRADIENT_OF, way=way, name=edge) for edge in edges for way in _TIMES]
    multiplied = [f"by-{operand}" for operand in operands]
    sizes = [n for n in range(2, _MOST_PARTS + 1) if width and width % n == 0 and width > n]
    for edge in edges:
        found += [
            Change(part=GRADIENT_OF, way=way, number=power, name=edge)
            for power in _POWERS
            for way in multiplied
        ]
        found += [Change(part=GRADIENT_OF, way=way, name=edge) for way in (_INSIDE if has_width else ())]
        ways = [(way, n) for n in sizes for way in ("first-part", "last-part", "mean-of-parts")]
        found += [Change(part=GRADIENT_OF, way=way, number=n, name=edge) for way, n in ways]
        if over_tokens:
            found += [Change(part=GRADIENT_OF, way=way, name=edge) for way in _OVER_TOKENS]
    return found


def list_score_ways(*edges: str, operands: Iterable[str] = (), of_keys: bool = True) -> list[Change]:
    """Return the same of tensors with a number for each head and query, and for each key where they are `of_keys`."""
    found = list_edge_ways(*edges, operands=operands, over_tokens=False, has_width=of_keys)
    return found + [Change(part=GRADIENT_OF, way=way, name=edge) for edge in edges for way in _OF_SCORES]


def list_group_ways(*edges: str, size: int) -> list[Change]:
    """Return how the sum over the query heads of a group, of so many, may be made otherwise."""
    ways = _OF_GROUPS if size > 1 else ()
    return [Change(part=GRADIENT_OF, way=way, number=size, name=edge) for edge in edges for way in ways]


def needs_call(changes: Mapping[str, Change]) -> bool:
    """Return whether a change takes the gradient of other tokens, so that all of a call must be computed."""
    return any(each.part == GRADIENT_OF and each.way in _OVER_TOKENS for each in changes.values())


def change_gradient(gradient: Tensor, change: Change, operands: Operands) -> Tensor:
    """Return a gradient (b, s, ..., W) as it comes back otherwise."""
    number = 1.0 if change.number is None else float(change.number)
    way = change.way
    if way in _TIMES or way == "times":
        return gradient * _TIMES.get(way, number)
    if way in _WITHOUT_NUMBER:
        return _WITHOUT_NUMBER[way](gradient)
    if way in _OF_GROUPS:
        shape = (*gradient.shape[:2], -1, int(number), gradient.shape[-1])
        groups = gradient.reshape(shape)
        is_kept = torch.arange(int(number)) == (0 if way == "first-of-group" else int(number) - 1)
        return torch.where(is_kept[:, None], groups, 0.0).flatten(2, 3)
    if way.startswith("by-"):
        operand = next(tensor for name, tensor in operands.items() if way == f"by-{name}")
        return gradient * operand.detach() ** int(number)
    parts = gradient.reshape(*gradient.shape[:-1], int(number), -1)
    if way == "mean-of-parts":
        return parts.mean(-1, keepdim=True).expand_as(parts).reshape(gradient.shape)
    kept = torch.zeros(int(number), 1, dtype=gradient.dtype)
    kept[0 if way == "first-part" else -1] = 1.0
    return (parts * kept).reshape(gradient.shape)


def weigh_gradient(
    x: Tensor, edge: str, changes: Mapping[str, Change], operands: Operands | None = None
) -> Tensor:
    """Return a tensor inside of a formula, whose gradient comes back otherwise where a change says so."""
    change = changes.get(f"{GRADIENT_OF}:{edge}")
    if change is None or not x.requires_grad:
        return x
    passed = x.view_as(x)
    passed.register_hook(partial(change_gradient, change=change, operands=operands or {}))  # type: ignore[no-untyped-call]
    return passed
