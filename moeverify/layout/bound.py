"""Which tensor each name of a model is bound to: a name may be bound to another tensor while the model is trained.

An optimizer and a checkpoint keep the tensors that they were given. A module that assigns a new tensor to one of its
names, such as `self.bias = self.bias + step`, computes with one that they do not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moeverify.layout.local_shard import LocalShard, logical_name
from moeverify.layout.placement import local_part


@dataclass(frozen=True)
class Rebound:
    """A parameter or buffer whose name was bound to `old` and is bound to `new` now."""

    name: str
    is_buffer: bool
    old: Tensor
    new: Tensor

    def measure_error(self) -> float:
        """Return how far the old values of this rank are from the new ones, relative to these."""
        old, new = (_as_numbers(local_part(each)) for each in (self.old, self.new))
        return float((old - new).norm() / new.norm().clamp(min=torch.finfo(torch.float64).tiny))


class BoundTensors:
    """The parameters and persistent buffers of a model as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bound = dict(_list_bound(model))
        self._ids = {id(tensor) for tensor, _ in self._bound.values()}

    def find_rebound(self) -> list[Rebound]:
        """Return what is bound to another tensor now, that takes the place of the one that it was bound to.

        A wrapper may put a gathered tensor in the place of a shard, and a view in that of what it shows: neither
        takes its place. Nor does another parameter of the model, to which a tied one may be bound.
        """
        found = []
        for name, (new, is_buffer) in _list_bound(self._model):
            old, _ = self._bound.get(name, (new, is_buffer))
            if new is not old and id(new) not in self._ids and _is_of_same_kind(old, new):
                found.append(Rebound(logical_name(name), is_buffer, old, new))
        return found


def take_live(shards: Sequence[LocalShard], rebound: Sequence[Rebound]) -> list[LocalShard]:
    """Return the shards with the tensors that their names are bound to now."""
    parameters = {id(each.old): each.new for each in rebound if not each.is_buffer}
    # A shard of a complex buffer has a view of it: the name says which it is.
    buffers = {each.name: each.new for each in rebound if each.is_buffer}
    found = []
    for shard in shards:
        new = parameters.get(id(shard.tensor))
        if new is None and not isinstance(shard.tensor, nn.Parameter):
            new = buffers.get(shard.name)
            new = torch.view_as_real(new) if new is not None and new.is_complex() else new
        found.append(shard if new is None else replace(shard, tensor=new))
    return found


def _list_bound(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Yield (name, (tensor, whether it is a buffer)), a tied parameter under each of its names."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{start}{name}", (parameter, False)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{start}{name}", (buffer, True)


def _is_of_same_kind(old: Tensor, new: Tensor) -> bool:
    """Return whether one tensor can stand for the other on this rank, and has memory of its own."""
    if isinstance(old, DTensor) != isinstance(new, DTensor):
        return False
    one, other = local_part(old), local_part(new)
    if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return False
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def _as_numbers(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().to(torch.float64)
