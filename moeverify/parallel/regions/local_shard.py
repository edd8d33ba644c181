"""The logical parameters and buffers of a parallelized model, and this rank's shard of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from moeverify.parallel.regions.placement import local_part, region_of
from moeverify.parallel.regions.region import Region

_WRAPPERS = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_pipeline_stage_\d+|_forward_module|module)(?=\.|$)"
)


def logical_name(name: str) -> str:
    """Return the FQN that a parameter has in the unwrapped model.

    DDP, FSDP1, activation checkpointing, compilation and the pipeline stages of moeverify each insert a
    component.
    """
    return _WRAPPERS.sub("", name).lstrip(".")


class StoredParameter(Protocol):
    """Storage of a logical parameter in a third-party module (see `parameters`)."""

    @property
    def name(self) -> str:
        """Return the logical name, relative to the module."""

    @property
    def rows(self) -> int:
        """Return the number of rows per expert if (E, rows, n) is stored as (E * rows, n), else 0."""

    @property
    def is_transposed(self) -> bool:
        """Return whether the logical tensor is (E, n, rows)."""


class RowBlock(Protocol):
    """Consecutive stored rows that hold given rows of the logical parameter.

    It describes layouts that no torch placement can express. A module lists the blocks of all its own
    parameters in `row_blocks`; each block becomes a shard.
    """

    @property
    def start(self) -> int:
        """Return the first of the stored rows."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Return the rows of the logical parameter that are stored."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the logical parameter."""


def _keep(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class LocalShard:
    """A logical tensor of the model and the region of it that this rank stores in `tensor`.

    Gradients and optimizer moments of a parameter have the same region. `view` reshapes the stored tensor
    to the shape of the region, without a copy.
    """

    name: str
    tensor: Tensor
    region: Region
    view: Callable[[Tensor], Tensor] = _keep

    def local(self, tensor: Tensor | None = None) -> Tensor:
        """Return the local values of `tensor` (a gradient, a moment), by default of the shard itself."""
        stored = local_part(self.tensor if tensor is None else tensor).detach()
        return stored if stored.ndim == 0 else self.view(stored)


def parameters(model: nn.Module) -> list[LocalShard]:
    """Return the shards of all parameters that this rank stores, in model order; tied ones appear once.

    A module that stores parameters in another form describes it in `stored_as`, by their names in the
    module.
    """
    flat = {id(each.parameter): each.region for each in flat_shards(model)}
    stored = dict(_stored_otherwise(model))
    blocks = dict(_list_row_blocks(model))
    shards: list[LocalShard] = []
    for name, parameter in model.named_parameters():
        region = flat.get(id(parameter)) or region_of(parameter)
        if name in blocks:
            shards += [_shard_rows(name, parameter, block) for block in blocks[name]]
        elif name in stored:
            shards.append(_shard(*stored[name], parameter, region))
        elif region.numel or not flat:
            # FSDP1 gives a rank without any element of a parameter an empty tensor, which has no gradient.
            shards.append(LocalShard(logical_name(name), parameter, region))
    return shards


def _stored_otherwise(model: nn.Module) -> Iterator[tuple[str, tuple[str, StoredParameter]]]:
    """Yield (name of the parameter, (logical name of its module, its storage layout))."""
    for prefix, module in model.named_modules():
        described: Mapping[str, StoredParameter] = getattr(module, "stored_as", {})
        for name, stored in described.items():
            yield f"{prefix}.{name}", (logical_name(prefix), stored)


def join_regions(shards: Sequence[LocalShard]) -> dict[str, Region]:
    """Return the region that this rank stores of each logical tensor, by name; row blocks are joined."""
    found: dict[str, Region] = {}
    for shard in shards:
        known = found.get(shard.name)
        if known is None or not known.dims or known.dims[1:] != shard.region.dims[1:]:
            found[shard.name] = shard.region
        else:
            rows = sorted({*known.dims[0], *shard.region.dims[0]})
            found[shard.name] = Region.box(known.shape, [rows, *known.dims[1:]])
    return found


def _list_row_blocks(model: nn.Module) -> Iterator[tuple[str, Sequence[RowBlock]]]:
    """Yield (name of the parameter, its row blocks)."""
    for prefix, module in model.named_modules():
        blocks: Sequence[RowBlock] = getattr(module, "row_blocks", ())
        if blocks:
            yield from ((f"{prefix}.{name}", blocks) for name, _ in module.named_parameters(recurse=False))


def _shard_rows(name: str, parameter: Tensor, block: RowBlock) -> LocalShard:
    shape = (block.num_rows, *parameter.shape[1:])
    region = Region.box(shape, [block.indices, *map(range, shape[1:])])
    return LocalShard(logical_name(name), parameter, region, partial(_take_rows, block=block))


def _take_rows(tensor: Tensor, *, block: RowBlock) -> Tensor:
    return tensor.narrow(0, block.start, len(block.indices))


def _shard(module: str, stored: StoredParameter, parameter: Tensor, region: Region) -> LocalShard:
    name = f"{module}.{stored.name}"
    if not stored.rows:
        return LocalShard(name, parameter, region)
    return LocalShard(name, parameter, _unstack(region, stored), partial(_split_rows, stored=stored))


def _unstack(region: Region, stored: StoredParameter) -> Region:
    """Return the region of (E, rows, n) or (E, n, rows) that corresponds to a region of (E * rows, n).

    Raises: ValueError when a shard ends within an expert, which is no box of a transposed tensor.
    """
    (height, width), (rows, columns) = region.shape, region.dims
    first, last = (rows[0], rows[-1] + 1) if rows else (0, 0)
    if not isinstance(rows, range) or first % stored.rows or last % stored.rows:
        raise ValueError(f"rows {first} to {last} are not whole experts of {stored.rows} rows")
    experts = range(first // stored.rows, last // stored.rows)
    inner = [(stored.rows, range(stored.rows)), (width, columns)]
    (high, along), (wide, across) = reversed(inner) if stored.is_transposed else inner
    return Region.box((height // stored.rows, high, wide), (experts, along, across))


def _split_rows(tensor: Tensor, *, stored: StoredParameter) -> Tensor:
    apart = tensor.view(-1, stored.rows, tensor.shape[-1])
    return apart.transpose(1, 2) if stored.is_transposed else apart


def buffers(model: nn.Module) -> list[LocalShard]:
    """Return the shards of all persistent buffers, in model order; complex buffers become real pairs."""
    shards: list[LocalShard] = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                # Real pairs (..., 2): comparison, checkpoints and collectives do not support complex
                # dtypes.
                values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                shards.append(LocalShard(logical_name(f"{prefix}.{name}"), values, region_of(values)))
    return shards


@dataclass(frozen=True)
class FlatShard:
    """A parameter that FSDP1 stores as a range of a flat one; `read` returns its local part, flattened."""

    parameter: Tensor
    region: Region
    read: Callable[[], Tensor]


def flat_shards(model: nn.Module) -> Iterator[FlatShard]:
    """Yield the parameters that FSDP1 stores as ranges of a flat parameter.

    Raises: TypeError when FSDP1 was applied without `use_orig_params=True`.
    """
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        flat = module._handle.flat_param
        parameters = flat._params
        if parameters is None:
            raise TypeError("FSDP1 is verified with use_orig_params=True only")
        for parameter, shape, shard in zip(parameters, flat._shapes, flat._shard_param_infos, strict=True):
            first, last = shard.intra_param_start_idx, shard.intra_param_end_idx
            # torch's last index is inclusive. Both are None on a rank without any element of the parameter.
            run = range(0) if first is None or last is None else range(first, last + 1)
            read = partial(_read_run, module._handle, shard.offset_in_shard or 0, len(run))
            yield FlatShard(parameter, Region.run(shape, run.start, run.stop), read)


def _read_run(handle: Any, offset: int, length: int) -> Tensor:
    """Return a range of FSDP1's stored shard, which is separate from the gathered parameter when sharded."""
    flat = handle.flat_param
    # Before the first forward pass the flat parameter is the shard itself.
    stored: Tensor = getattr(flat, "_local_shard", flat) if handle.uses_sharded_strategy else flat
    return stored[offset : offset + length]
