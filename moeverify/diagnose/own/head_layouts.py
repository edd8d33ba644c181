"""Heads that a user's attention reads in another layout: where they are split, or where they are taken.

Letters: n ranks of a context group, B rows, S positions, s of them on one rank, N heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeverify.diagnose.own.replay import Candidate, Stage
from moeverify.diagnose.own.step_mistakes import Site, name_step
from moeverify.diagnose.own.steps import Function, Step
from moeverify.diagnose.own.trace import Child
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.own_module import Mistake

_SPLITS = frozenset({"view", "reshape", "unflatten"})
_ATTENTION = "scaled_dot_product_attention"
OUTPUT_OF = "output:"
_TAKEN = {"queries": (0,), "keys": (1,), "values": (2,), "keys-and-values": (1, 2), "all": (0, 1, 2)}

_WAYS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sequence-first": lambda x: x.transpose(0, 1).reshape(x.shape),
    "batch-first": lambda x: x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1),
    "heads-first": lambda x: x.transpose(1, 2).reshape(x.shape),
    "heads-last": lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1], -1).transpose(1, 2),
    "width-first": lambda x: x.transpose(2, 3).reshape(x.shape),
    "width-last": lambda x: x.reshape(*x.shape[:2], x.shape[3], x.shape[2]).transpose(2, 3),
}
"""What each rank makes of its own chunk (B, s, N, D)."""

_GATHERED: Mapping[str, Callable[[Tensor], Tensor]] = {
    # (n, B, s, ...) is read as (B, n, s, ...).
    "ranks-first": lambda x: x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1),
    "ranks-last": lambda x: x.transpose(0, 1).reshape(x.shape),
    "ranks-reversed": lambda x: x.flip(0),
}
"""What is made of the chunks of all ranks, (n, B, s, N, D)."""


def list_layout_mistakes(
    sites: Sequence[Site], module: str, tensor: WrongTensor, children: Mapping[str, Child]
) -> Iterator[Candidate]:
    """Yield heads in other layouts: what each split gives, what all splits give, and what attention takes.

    A split of what a module inside puts out is named by that.
    """
    shape = tuple(tensor.expected.shape[:2])
    blocks = _list_blocks(tensor)
    splits = [site for site in sites if site.step.name in _SPLITS and _has_heads(site.step.result, shape)]
    together = dict.fromkeys(number for site in splits for number in site.numbers)
    if len(splits) > 1:
        splits = [*splits, replace(splits[0], numbers=tuple(together))]
    for site in splits:
        what = _name_source(site, module, children)
        for way in _list_ways(tuple(site.step.result.shape), blocks):
            yield _say(site, module, way, what, partial(_split, way, blocks))
    for site in sites:
        taken = [each for each in site.step.args[:3] if isinstance(each, Tensor)]
        if site.step.name != _ATTENTION or len(taken) < 3 or any(each.ndim != 4 for each in taken):
            continue
        if any((each.shape[0], each.shape[2]) != shape for each in taken):
            continue
        turned = tuple(taken[1].transpose(1, 2).shape)
        for what, places in _TAKEN.items():
            for way in _list_ways(turned, blocks):
                yield _say(site, module, way, what, partial(_attend, way, places, blocks))


def _name_source(site: Site, module: str, children: Mapping[str, Child]) -> str:
    """Return the module whose output alone is split; nothing where there are several, or it is none's."""
    source = site.step.args[0] if len(site.numbers) == 1 and site.step.args else None
    names = [
        name
        for name, child in children.items()
        if isinstance(source, Tensor) and child.made is not None and name
        if child.made.shape == source.shape and torch.equal(child.made, source)
    ]
    return f"{OUTPUT_OF}{'.'.join(each for each in (module, names[0]) if each)}" if names else ""


_Blocks = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]
"""The rows that ranks have, and the positions that each rank of a context group has."""


def _list_blocks(tensor: WrongTensor) -> _Blocks:
    shards = sorted(tensor.shards, key=lambda each: each.rank)
    rows, positions = (list(dict.fromkeys(tuple(each.region.dims[dim]) for each in shards)) for dim in (0, 1))
    return rows, positions


def _has_heads(result: Any, shape: tuple[int, ...]) -> bool:
    is_float = isinstance(result, Tensor) and result.is_floating_point()
    return is_float and result.ndim == len(shape) + 2 and tuple(result.shape[:2]) == shape


def _list_ways(shape: Sequence[int], blocks: _Blocks) -> list[str]:
    """Return the layouts in which a rank may read its part of heads (B, S, N, D)."""
    rows, positions = blocks
    return list_layouts((len(rows[0]), *shape[1:]), len(positions))


def list_layouts(shape: Sequence[int], num_ranks: int) -> list[str]:
    """Return the ways; of two that are one the other way round, one where the dims have one size."""
    rows, length, heads, width = shape
    sizes = {"batch-first": (rows, length // num_ranks), "heads-last": (length // num_ranks, heads)}
    sizes |= {"width-last": (heads, width), "ranks-last": (num_ranks, rows)}
    ways = [*_WAYS, *(_GATHERED if num_ranks > 1 else ())]
    return [way for way in ways if way not in sizes or sizes[way][0] != sizes[way][1]]


def _say(site: Site, module: str, way: str, what: str, make: Any) -> Candidate:
    step: Step = site.step
    inside = ".".join(each for each in (module, step.module) if each)
    mistake = Mistake(
        part="step", name=name_step(step), way=f"relaid:{way}", module=inside, line=step.line, after=what
    )

    def plant(stage: Stage, number: float) -> None:
        stage.changes.update(dict.fromkeys(site.numbers, make))

    return Candidate(mistake, plant)


def _relay(x: Tensor, way: str, blocks: _Blocks) -> Tensor:
    """Return heads (B, S, N, D) as ranks read them that have some rows and positions each."""
    found = torch.empty_like(x)
    for rows in blocks[0]:
        found[list(rows)] = relay(x[list(rows)], way, blocks[1])
    return found


def relay(x: Tensor, way: str, positions: Sequence[Sequence[int]]) -> Tensor:
    """Return heads (B, S, N, D) as they are read; `positions` are those of each rank, in its order."""
    chunks = torch.stack([x[:, list(part)] for part in positions])
    turned = (
        _GATHERED[way](chunks) if way in _GATHERED else torch.stack([_WAYS[way](each) for each in chunks])
    )
    found = torch.empty_like(x)
    for part, chunk in zip(positions, turned, strict=True):
        found[:, list(part)] = chunk
    return found


def _split(
    way: str, blocks: _Blocks, function: Function, args: tuple[Any, ...], named: dict[str, Any]
) -> Tensor:
    return _relay(function(*args, **named), way, blocks)


def _attend(
    way: str,
    places: Sequence[int],
    blocks: _Blocks,
    function: Function,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    turned = [
        _relay(each.transpose(1, 2), way, blocks).transpose(1, 2) if place in places else each
        for place, each in enumerate(args)
    ]
    return function(*turned, **named)
