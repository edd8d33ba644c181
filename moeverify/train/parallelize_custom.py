"""Parallelization by a user's own function, or by torch's plain wrappers.

The model may be the user's or the reference model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moeverify.cases.schema import Layout
from moeverify.errors import CaseError, Problem
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.regions.by_value import Unplaced, place_by_value, place_region
from moeverify.parallel.regions.local_shard import LocalShard, parameters
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.parallel.wrapper import apply_wrapper
from moeverify.train.engine import Engine, PlainEngine
from moeverify.train.target import resolve

MakeOptimizer = Callable[[nn.Module], Optimizer]
MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelizedCustomModel:
    """A parallel model, with an optional function that completes its gradients and an engine for its steps.

    A `parallelize` function may return this object. `names` maps a local parameter name to its logical
    name, and `regions` maps it to its region of the logical parameter. A tensor that they do not describe
    is matched by logical name and shape. If that fails it is located by its initial values, or by the
    placements of a DTensor. Set `numbers_locally` if names such as `experts.0` denote different experts on
    each rank: all tensors are then located. `accumulate(last)` returns the context around a micro-batch's
    forward and backward pass, for frameworks with their own `no_sync`. By default it is the context for
    DDP, FSDP1 and FSDP2.
    """

    model: nn.Module
    finalize: Callable[[], object] | None = None
    engine: Engine = field(default_factory=PlainEngine)
    names: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
    numbers_locally: bool = False
    accumulate: Callable[[bool], AbstractContextManager[object]] | None = None

    def list_shards(self, whole: Mapping[str, Tensor]) -> list[LocalShard]:
        """Return this rank's shards of the parameters; `whole` maps all names to initial values.

        Raises: CaseError when the values of a tensor fit several parameters, or when `names` or `regions`
        do not fit the whole model.
        """
        if problems := list(self._refuse_declarations(whole)):
            raise CaseError(problems)
        shards: list[LocalShard] = []
        unplaced: list[Unplaced] = []
        for shard in parameters(self.model):
            if not self._is_searched(shard, whole):
                shards.append(shard)
                continue
            found, failed = self._place(shard, whole)
            # Unmatched values keep their local name: the comparison reports that the golden has no such
            # tensor.
            shards += found or [shard]
            unplaced += [each for each in failed if each.candidates]
        if unplaced:
            raise CaseError([_describe_unplaced(each) for each in unplaced])
        return shards

    def _place(
        self, shard: LocalShard, whole: Mapping[str, Tensor]
    ) -> tuple[Sequence[LocalShard], Sequence[Unplaced]]:
        """Return the shards within a tensor that name and shape do not identify, and unplaced tensors."""
        name = self.names.get(shard.name)
        if isinstance(shard.tensor, DTensor) and shard.name not in self.regions:
            if name is not None and tuple(whole[name].shape) == shard.region.shape:
                return [replace(shard, name=name)], []
            others = [each.name for each in parameters(self.model) if not self._is_searched(each, whole)]
            placed = place_region(shard, whole if name is None else {}, others)
            if placed is not None:
                return ([placed], []) if isinstance(placed, LocalShard) else ([], [placed])
        local = {shard.name: shard.tensor}
        return place_by_value(local, whole, names=self.names, regions=self.regions)

    def _refuse_declarations(self, whole: Mapping[str, Tensor]) -> Iterator[Problem]:
        """Yield a problem for each entry of `names` and `regions` that does not fit the whole model."""
        local = {shard.name: tuple(local_part(shard.tensor).shape) for shard in parameters(self.model)}
        for local_name, name in self.names.items():
            if name not in whole:
                message = (
                    f"`names` says that `{local_name}` is `{name}`, and the whole model has no such parameter"
                )
                yield Problem(message, path="layout.parallelize", remedy=_suggest(name, whole))
        for local_name, region in self.regions.items():
            name = self.names.get(local_name, local_name)
            if local_name not in local:
                continue  # declared for another rank
            if name not in whole:
                if local_name not in self.names:
                    message = f"`regions` has `{local_name}`, and the whole model has no such parameter"
                    remedy = f"say which one it is by names={{{local_name!r}: ...}}; {_suggest(name, whole)}"
                    yield Problem(message, path="layout.parallelize", remedy=remedy)
            elif (region.shape, region.local_shape) != (tuple(whole[name].shape), local[local_name]):
                message = (
                    f"`regions` says that `{local_name}` is {region.local_shape} of {region.shape}; it has the shape "
                    f"{local[local_name]}, and `{name}` has {tuple(whole[name].shape)}"
                )
                yield Problem(
                    message, path="layout.parallelize", remedy="give the indices that it has along each dim"
                )

    def _is_searched(self, shard: LocalShard, whole: Mapping[str, Tensor]) -> bool:
        if shard.region.flat is not None:
            return False
        known = whole.get(shard.name)
        declared = shard.name in self.names or shard.name in self.regions
        return declared or self.numbers_locally or known is None or known.shape != shard.region.shape


def _suggest(name: str, whole: Mapping[str, Tensor]) -> str:
    close = get_close_matches(name, whole, n=3, cutoff=0.0)
    return f"those whose names are most alike are {', '.join(close)}"


def _describe_unplaced(tensor: Unplaced) -> Problem:
    some = ", ".join(tensor.candidates[:3]) + (", ..." if len(tensor.candidates) > 3 else "")
    message = (
        f"`{tensor.name}` of shape {tensor.shape} on this rank may be a part of {len(tensor.candidates)} "
        f"parameters of the whole model, or several parts of one: its initial values stand in {some}"
    )
    remedy = (
        "return ParallelizedCustomModel(model, names={local name: name}, regions={local name: Region}), or give the "
        "parameters initial values that differ"
    )
    return Problem(message, path="layout.parallelize", remedy=remedy)


def parallelize_custom(
    model: nn.Module,
    layout: Layout,
    meshes: Meshes,
    device: torch.device,
    make_optimizer: MakeOptimizer,
    compute: torch.dtype | None = None,
) -> ParallelizedCustomModel:
    """Return the model under the layout, parallelized by the user's function or else by torch's wrapper.

    The function is called as `parallelize(model, mesh, **arguments)` with the mesh of `MESH_AXES`. It
    returns one of:
    - the parallel model;
    - (model, function without arguments that completes the gradients of a step);
    - (model, engine that carries out the steps), see `moeverify.train.engine.Engine`;
    - a `ParallelizedCustomModel`.

    Gradients must then be averaged over the ranks that see other tokens, as in DDP and FSDP. A function
    with a parameter `make_optimizer` gets a callable that takes the model and returns the recipe's
    optimizer. It serves frameworks that wrap both together, whose engine is then a `PreparedEngine`. For
    example:

        def parallelize(model, mesh):
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp_shard"])
            return fully_shard(model, mesh=mesh["dp_shard"])

    Collective: all ranks.

    Raises: CaseError when the function returns another type.
    """
    if layout.parallelize is None:
        return ParallelizedCustomModel(apply_wrapper(model, layout, meshes, device, compute))
    function = resolve(layout.parallelize, "layout.parallelize")
    mesh: DeviceMesh = meshes.data[MESH_AXES]
    offered = {"make_optimizer": make_optimizer} if _takes(function, "make_optimizer") else {}
    returned = function(model, mesh, **offered, **layout.arguments)
    if isinstance(returned, ParallelizedCustomModel):
        return returned
    parallel, second = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if isinstance(parallel, nn.Module):
        if second is not None and _is_engine(second):
            return ParallelizedCustomModel(parallel, engine=second)
        if second is None or callable(second):
            return ParallelizedCustomModel(parallel, second)
    message = f"`{layout.parallelize}` returned {type(returned).__name__} and not a module"
    remedy = "return the parallel model, (model, function that completes the gradients), or (model, engine)"
    raise CaseError([Problem(message, path="layout.parallelize", remedy=remedy)])


def _takes(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has a named parameter `name`; `**arguments` does not count."""
    return name in inspect.signature(function).parameters


def _is_engine(value: object) -> TypeGuard[Engine]:
    """Return whether a value has all methods of `Engine`."""
    methods = [name for name in vars(Engine) if not name.startswith("_")]
    return all(callable(getattr(value, name, None)) for name in methods)
