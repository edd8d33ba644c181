"""The logical parameters and buffers of a model that has been parallelized, and this rank's shard of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from moeverify.layout.placement import local_part, region_of
from moeverify.layout.region import Region

_WRAPPERS = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_pipeline_stage_\d+|_forward_module|module)(?=\.|$)"
)


def logical_name(name: str) -> str:
    """Return the name that a parameter has in the unwrapped model.

    DDP, FSDP1, activation checkpointing, compilation and our pipelines each insert a component into the FQN.
    """
    return _WRAPPERS.sub("", name).lstrip(".")


class StorageLayout(Protocol):
    """How someone else's module stores a logical parameter (see `parameters`)."""

    @property
    def name(self) -> str:
        """Return the logical name, below that of the module."""

    @property
    def rows(self) -> int:
        """Return how many rows each expert has where (E, rows, n) is stored as (E * rows, n); else 0."""

    @property
    def is_transposed(self) -> bool:
        """Return whether the logical tensor is (E, n, rows)."""


class RowBlock(Protocol):
    """Rows of a stored parameter that are given rows of the logical one, where no placement of torch can say so.

    A module says in its `row_blocks` what the rows of all parameters of its own are: each block is a shard.
    """

    @property
    def start(self) -> int:
        """Return the first of the stored rows."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Return which rows of the logical parameter they are."""

    @property
    def num_rows(self) -> int:
        """Return how many rows the logical parameter has."""


def _keep(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class LocalShard:
    """A logical tensor of the model and the region of it that this rank stores in `tensor`.

    Gradients and optimizer moments of a parameter have the same region. `view` turns what is stored into the
    shape of the region, without a copy.
    """

    name: str
    tensor: Tensor
    region: Region
    view: Callable[[Tensor], Tensor] = _keep

    def local(self, tensor: Tensor | None = None) -> Tensor:
        """Return the locally stored values, of `tensor` (a gradient, a moment) or of the tensor itself."""
        stored = local_part(self.tensor if tensor is None else tensor).detach()
        return stored if stored.ndim == 0 else self.view(stored)


def parameters(model: nn.Module) -> list[LocalShard]:
    """Return every parameter of which this rank stores something, in the model's order, tied ones once.

    A module may store parameters otherwise than they are meant: its `stored_as` says how, by their names in it.
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
            # FSDP1 gives a rank that has nothing of a parameter an empty one, which has no gradient either.
            shards.append(LocalShard(logical_name(name), parameter, region))
    return shards


def _stored_otherwise(model: nn.Module) -> Iterator[tuple[str, tuple[str, StorageLayout]]]:
    """Yield (name of the parameter, (logical name of its module, how it is stored))."""
    for prefix, module in model.named_modules():
        described: Mapping[str, StorageLayout] = getattr(module, "stored_as", {})
        for name, stored in described.items():
            yield f"{prefix}.{name}", (logical_name(prefix), stored)


def join_regions(shards: Sequence[LocalShard]) -> dict[str, Region]:
    """Return what this rank stores of each logical tensor, by name: blocks of rows as one region."""
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
    """Yield (name of the parameter, what its rows are)."""
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


def _shard(module: str, stored: StorageLayout, parameter: Tensor, region: Region) -> LocalShard:
    name = f"{module}.{stored.name}"
    if not stored.rows:
        return LocalShard(name, parameter, region)
    return LocalShard(name, parameter, _unstack(region, stored), partial(_split_rows, stored=stored))


def _unstack(region: Region, stored: StorageLayout) -> Region:
    """Return the region of (E, rows, n), or of (E, n, rows), that a region of (E * rows, n) is.

    Raises: ValueError where a shard ends within an expert, which is no box of a transposed tensor.
    """
    (height, width), (rows, columns) = region.shape, region.dims
    first, last = (rows[0], rows[-1] + 1) if rows else (0, 0)
    if not isinstance(rows, range) or first % stored.rows or last % stored.rows:
        raise ValueError(f"rows {first} to {last} are not whole experts of {stored.rows} rows")
    experts = range(first // stored.rows, last // stored.rows)
    inner = [(stored.rows, range(stored.rows)), (width, columns)]
    (high, along), (wide, across) = reversed(inner) if stored.is_transposed else inner
    return Region.box((height // stored.rows, high, wide), (experts, along, across))


def _split_rows(tensor: Tensor, *, stored: StorageLayout) -> Tensor:
    apart = tensor.view(-1, stored.rows, tensor.shape[-1])
    return apart.transpose(1, 2) if stored.is_transposed else apart


def buffers(model: nn.Module) -> list[LocalShard]:
    """Return every persistent buffer of the model, in the model's order; a complex one as pairs of numbers."""
    shards: list[LocalShard] = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                # Pairs (..., 2) of real numbers: comparison, checkpoints and collectives know no complex ones.
                values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                shards.append(LocalShard(logical_name(f"{prefix}.{name}"), values, region_of(values)))
    return shards


@dataclass(frozen=True)
class FlatShard:
    """A parameter that FSDP1 keeps as a run of a flat one; `read` returns what this rank stores of it, flattened."""

    parameter: Tensor
    region: Region
    read: Callable[[], Tensor]


def flat_shards(model: nn.Module) -> Iterator[FlatShard]:
    """Yield the parameters that FSDP1 keeps as runs of a flat parameter."""
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        flat = module._handle.flat_param
        parameters = flat._params
        if parameters is None:
            raise TypeError("FSDP1 is verified with use_orig_params=True only")
        for parameter, shape, shard in zip(parameters, flat._shapes, flat._shard_param_infos, strict=True):
            first, last = shard.intra_param_start_idx, shard.intra_param_end_idx
            # Torch's last index is inclusive, and both are None on a rank that has nothing of the parameter.
            run = range(0) if first is None or last is None else range(first, last + 1)
            read = partial(_read_run, module._handle, shard.offset_in_shard or 0, len(run))
            yield FlatShard(parameter, Region.run(shape, run.start, run.stop), read)


def _read_run(handle: Any, offset: int, length: int) -> Tensor:
    """Return a run of what FSDP1 stores; where it cuts the flat parameter, that is apart from what it gathers."""
    flat = handle.flat_param
    # Before the first forward pass the flat parameter is the shard itself.
    stored: Tensor = getattr(flat, "_local_shard", flat) if handle.uses_sharded_strategy else flat
    return stored[offset : offset + length]
