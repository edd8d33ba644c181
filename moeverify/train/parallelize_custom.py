"""A user's own function that parallelizes a model, and torch's plain wrappers in its place.

It is given any model: a user's, or the reference model.
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

from moeverify.case.schema import Layout
from moeverify.errors import CaseError, Problem
from moeverify.layout.by_value import Unplaced, place_by_value, place_region
from moeverify.layout.local_shard import LocalShard, parameters
from moeverify.layout.placement import local_part
from moeverify.layout.region import Region
from moeverify.parallel.meshes import Meshes
from moeverify.parallel.wrapper import apply_wrapper
from moeverify.train.engine import Engine, PlainEngine
from moeverify.train.target import resolve

MakeOptimizer = Callable[[nn.Module], Optimizer]
MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelizedCustomModel:
    """A parallel model, what completes its gradients after the last backward pass, and what carries out its steps.

    A function that parallelizes may return one of these. `names` says which logical parameter a tensor belongs to and
    `regions` which part of it it is, both by the local name. What they leave out, and what has no logical parameter's
    name and shape, is found by its initial values, and by the placements of a DTensor; with `numbers_locally` every
    tensor is, since names such as `experts.0` mean another expert on each rank. `accumulate(last)` makes the context
    around the forward and backward pass of a micro-batch, for frameworks with a `no_sync` of their own; else that of
    DDP, FSDP1 and FSDP2 is used.
    """

    model: nn.Module
    finalize: Callable[[], object] | None = None
    engine: Engine = field(default_factory=PlainEngine)
    names: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
    numbers_locally: bool = False
    accumulate: Callable[[bool], AbstractContextManager[object]] | None = None

    def list_shards(self, whole: Mapping[str, Tensor]) -> list[LocalShard]:
        """Return this rank's shards of the parameters; `whole` are the initial values of all of them, by name.

        Raises: CaseError where values do not say which parameter a tensor is, and for declarations that name what the
            whole model does not have.
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
            # Values that stand nowhere are compared under the name that they have: the golden has no such tensor.
            shards += found or [shard]
            unplaced += [each for each in failed if each.candidates]
        if unplaced:
            raise CaseError([_describe_unplaced(each) for each in unplaced])
        return shards

    def _place(
        self, shard: LocalShard, whole: Mapping[str, Tensor]
    ) -> tuple[Sequence[LocalShard], Sequence[Unplaced]]:
        """Return what a tensor is whose name and shape do not say it, and it alone where that is not certain."""
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
        """Yield a problem for each of `names` and `regions` that is none of the whole model's."""
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
                continue  # another rank's
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
    """Return the model under the layout: by the user's function where there is one, else by torch's wrapper.

    The function is called as `parallelize(model, mesh, **arguments)` with the mesh of `MESH_AXES`, and returns the
    parallel model, or a pair of it and a function without arguments that completes the gradients of a step, or a pair
    of it and an engine (`moeverify.train.engine.Engine`) that carries out the steps, or a `ParallelizedCustomModel`.
    A function with a parameter `make_optimizer` is given one: called with the model it returns the optimizer of the
    recipe, for frameworks that take both together, whose engine is then a `PreparedEngine`.
    The gradients must then be averaged over the ranks that see other tokens, as DDP and FSDP do. For example:

        def parallelize(model, mesh):
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp_shard"])
            return fully_shard(model, mesh=mesh["dp_shard"])

    Collective: all ranks.

    Raises: CaseError where the function returns something else.
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
    """Return whether a function has a parameter of this name, apart from `**arguments`."""
    return name in inspect.signature(function).parameters


def _is_engine(value: object) -> TypeGuard[Engine]:
    """Return whether a value has the methods of an engine."""
    methods = [name for name in vars(Engine) if not name.startswith("_")]
    return all(callable(getattr(value, name, None)) for name in methods)
