"""Detection of names that a model rebinds to other tensors during training.

An optimizer and a checkpoint keep the tensors that they received. A module that assigns a new tensor to a
name, as in `self.bias = self.bias + step`, then computes with a tensor that they do not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moeverify.parallel.regions.local_shard import LocalShard, logical_name
from moeverify.parallel.regions.placement import local_part


@dataclass(frozen=True)
class Rebound:
    """A parameter or buffer whose name was bound to `old` and is now bound to `new`."""

    name: str
    is_buffer: bool
    old: Tensor
    new: Tensor

    def measure_error(self) -> float:
        """Return the norm of old minus new local values, relative to the norm of the new ones."""
        old, new = (_as_numbers(local_part(each)) for each in (self.old, self.new))
        return float((old - new).norm() / new.norm().clamp(min=torch.finfo(torch.float64).tiny))


class BoundTensors:
    """Snapshot of the parameters and persistent buffers of a model at construction time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bound = dict(_list_bound(model))
        self._ids = {id(tensor) for tensor, _ in self._bound.values()}

    def find_rebound(self) -> list[Rebound]:
        """Return the names that are now bound to a replacement tensor.

        These do not count as replacements: a gathered tensor instead of a shard, a view of the old tensor,
        and another parameter of the model (weight tying).
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
    # A shard of a complex buffer is a real view of it, so match it by name.
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
    """Yield (name, (tensor, whether it is a buffer)); a tied parameter appears under each of its names."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{start}{name}", (parameter, False)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{start}{name}", (buffer, True)


def _is_of_same_kind(old: Tensor, new: Tensor) -> bool:
    """Return whether `new` can replace `old` on this rank and does not share its memory."""
    if isinstance(old, DTensor) != isinstance(new, DTensor):
        return False
    one, other = local_part(old), local_part(new)
    if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return False
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def _as_numbers(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().to(torch.float64)
