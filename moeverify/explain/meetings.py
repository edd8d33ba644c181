"""Uniform representation of torch's collective APIs, for execution in a joint program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.explain.operators import NotExecutable, flatten_tensors
from moeverify.explain.program import GroupRef

_REDUCTIONS = ("sum", "avg", "product", "min", "max")


@dataclass(frozen=True)
class Call:
    """A collective call on this rank.

    `inputs` and `outputs` are in rank order where there is one tensor per rank. A functional collective has
    no `outputs`: its results are new tensors.
    """

    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    group: GroupRef
    options: dict[str, Any]
    source: int = -1
    target: int = -1


# For operators of `c10d`: (kind, position of the outputs, position of the inputs); -1 means none.
_FILLING = {
    "allreduce_": ("all_reduce", 0, 0),
    "allreduce_coalesced_": ("all_reduce", 0, 0),
    "allgather_": ("all_gather", 0, 1),
    "_allgather_base_": ("all_gather", 0, 1),
    "allgather_coalesced_": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 1),
    "reduce_scatter_": ("reduce_scatter", 0, 1),
    "_reduce_scatter_base_": ("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0, 1),
    "alltoall_": ("all_to_all", 0, 1),
    "alltoall_base_": ("all_to_all", 0, 1),
    "broadcast_": ("broadcast", 0, 0),
    "reduce_": ("reduce", 0, 0),
    "gather_": ("gather", 0, 1),
    "scatter_": ("scatter", 0, 1),
    "send": ("send", -1, 0),
    "recv_": ("recv", 0, -1),
    "recv_any_source_": ("recv", 0, -1),
}
_ROOT_AT = {"broadcast_": 2, "reduce_": 3, "gather_": 3, "scatter_": 3}
_PEER_AT = {"send": 2, "recv_": 2}


def read_filling(name: str, args: Sequence[Any]) -> Call | None:
    """Return the call of a `c10d` operator, or None if it moves no tensors, such as a barrier."""
    if name not in _FILLING:
        return None
    kind, filled, brought = _FILLING[name]
    group = next((describe(dist.ProcessGroup.unbox(each)) for each in args if _is_group(each)), None)
    if group is None:
        return None
    options: dict[str, Any] = {}
    reduction = next((each for each in args if _is_reduction(each)), None)
    if reduction is not None:
        options["reduction"] = _name_reduction(int(reduction.op()))
    if name in _ROOT_AT:
        options["root"] = int(args[_ROOT_AT[name]])
    if name == "alltoall_base_":
        options["splits"] = (list(args[3]), list(args[4]))
    outputs = [] if filled < 0 else flatten_tensors(args[filled])
    inputs = [] if brought < 0 else flatten_tensors(args[brought])
    source = target = -1
    if name in _PEER_AT:
        own, peer = _own_place(args), int(args[_PEER_AT[name]])
        source, target = (own, peer) if name == "send" else (peer, own)
    return Call(kind, inputs, outputs, group, options, source, target)


_RETURNING = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def read_returning(name: str, args: Sequence[Any]) -> Call | None:
    """Return the call of a `_c10d_functional` operator; one that ends in `_` writes to its inputs."""
    kind = _RETURNING.get(name.rstrip("_"))
    if kind is None:
        return None
    group = describe(dist.distributed_c10d._resolve_process_group(args[-1]))  # type: ignore[attr-defined]
    options: dict[str, Any] = {}
    reduction = next((each for each in args[1:-1] if isinstance(each, str)), None)
    if reduction is not None:
        options["reduction"] = reduction
    if kind == "all_to_all":
        options["splits"] = (list(args[1]), list(args[2]))
    if kind == "broadcast":
        options["root"] = int(args[1])
    inputs = flatten_tensors(args[0])
    return Call(kind, inputs, inputs if name.endswith("_") else [], group, options)


def describe(group: dist.ProcessGroup) -> GroupRef:
    """Return a group as plain data."""
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        ranks = tuple(range(group.size()))
    made_for = group.group_desc
    return GroupRef(
        group.group_name, ranks, made_for.removeprefix("mesh_") if made_for.startswith("mesh_") else ""
    )


def _name_reduction(number: int) -> str:
    kinds = dist.ReduceOp.RedOpType
    return next((name for name in _REDUCTIONS if int(getattr(kinds, name.upper())) == number), "other")


def _own_place(args: Sequence[Any]) -> int:
    return next(dist.ProcessGroup.unbox(each).rank() for each in args if _is_group(each))


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith("c10d.ProcessGroup")


def _is_reduction(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith("c10d.ReduceOp")


MOVING = frozenset({"all_gather", "all_to_all", "broadcast", "gather", "recv", "scatter"})
"""Collectives whose results consist of elements of their inputs."""


def execute(
    kind: str, options: Sequence[Mapping[str, Any]], brought: Sequence[Sequence[Tensor]], own: int
) -> Tensor:
    """Return all outputs of the rank at index `own` of a group, flattened and concatenated.

    `options` and `brought` have the options and inputs of each rank, in group order. Raises: NotExecutable
    for an unknown collective or reduction.
    """
    mine = brought[own]
    if kind in ("all_reduce", "reduce"):
        reduction = options[own].get("reduction", "sum")
        return _join(reduce([parts[i] for parts in brought], reduction) for i in range(len(mine)))
    if kind == "broadcast":
        return _join(brought[options[own].get("root", 0)])
    if kind in ("all_gather", "gather"):
        return _join(parts[i] for i in range(len(mine)) for parts in brought)
    if kind == "scatter":
        return _join([brought[options[own]["root"]][own]])
    if kind == "reduce_scatter":
        return _reduce_scatter(options[own].get("reduction", "sum"), brought, own)
    if kind == "all_to_all":
        return _all_to_all(options, brought, own)
    raise NotExecutable(kind)


def reduce(parts: Sequence[Tensor], reduction: str) -> Tensor:
    """Return the reduction of tensors of one shape.

    Raises: NotExecutable for an unknown reduction.
    """
    if reduction in ("sum", "avg"):
        total = parts[0].clone()
        for part in parts[1:]:
            total = total + part
        return total / len(parts) if reduction == "avg" else total
    if reduction in ("max", "min", "product"):
        stacked = torch.stack(list(parts))
        if reduction == "product":
            return stacked.prod(0)
        return stacked.amax(0) if reduction == "max" else stacked.amin(0)
    raise NotExecutable(reduction)


def _join(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _reduce_scatter(reduction: str, brought: Sequence[Sequence[Tensor]], own: int) -> Tensor:
    num_ranks = len(brought)
    if num_ranks > 1 and len(brought[own]) == num_ranks:  # a list with one tensor for each rank
        return reduce([parts[own] for parts in brought], reduction).reshape(-1)
    totals = (reduce([parts[i] for parts in brought], reduction) for i in range(len(brought[own])))
    return _join(total.reshape(-1).chunk(num_ranks)[own] for total in totals)


def _all_to_all(
    options: Sequence[Mapping[str, Any]], brought: Sequence[Sequence[Tensor]], own: int
) -> Tensor:
    num_ranks = len(brought)
    received: list[Tensor] = []
    for place, parts in enumerate(brought):
        if len(parts) == num_ranks and "splits" not in options[place]:
            received.append(parts[own])
            continue
        (rows,) = parts
        sizes = options[place]["splits"][1] or [len(rows) // num_ranks] * num_ranks
        start = sum(sizes[:own])
        received.append(rows[start : start + sizes[own]])
    return _join(received)
