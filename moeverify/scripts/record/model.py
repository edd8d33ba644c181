"""The model of a script, detected by its forward passes, with logical names for its parameters.

DeepSpeed ZeRO stages 1 and 2 concatenate the parameters of a group, and each rank updates one part in
float32. DeepSpeed stores at each parameter which elements are in this rank's part:
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/tensor_fragment.py
"""

from __future__ import annotations

import gc
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from moeverify.parallel.regions.local_shard import LocalShard, logical_name, parameters
from moeverify.parallel.regions.region import Region
from moeverify.scripts.record.variables import name_by_variables
from moeverify.train.calls.listener import find_site
from moeverify.verification.compare.difference import hash_words

V = TypeVar("V")
ROOT = "model"
"""Name of an outermost module."""
_NARROW = (torch.float16, torch.bfloat16)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_FRAMES = 4  # frames from our hook up to torch's frame with the model's arguments


class WatchedModel:
    """The outermost modules whose forward passes were seen, and the names of the optimizers' parameters.

    Parameters have their names in `owners`: the roots, or the module that contains several of them.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.owners: list[nn.Module] = []
        self.dtypes: set[str] = set()
        self._shards: dict[int, LocalShard] = {}  # by id of the parameter
        self._fragments: dict[int, list[LocalShard]] = {}  # by id of a flat ZeRO partition
        self._owners: dict[str, int] = {}  # name -> number of the outermost module with this parameter
        self._prefixes: dict[int, str] = {}  # by number of the outermost module
        self._has_names = False
        self._uses: dict[int, str] = {}  # id of a module -> file:line of its first call

    def add(self, module: nn.Module) -> bool:
        """Add an outermost module; return whether it is new and has parameters that no known module has."""
        if any(module is root for root in self.roots):
            return False
        known = {id(parameter) for root in self.roots for parameter in root.parameters()}
        if all(id(parameter) in known for parameter in module.parameters()):
            return False
        self.roots.append(module)
        self.owners.append(module)
        return True

    @property
    def uses(self) -> Mapping[int, str]:
        """Return the first call sites of modules by their ids."""
        return self._uses

    def note_use(self, module: nn.Module) -> None:
        """Store the call site of a module, unless it is known."""
        if id(module) not in self._uses:
            self._uses[id(module)] = find_site()

    def find_uses(self) -> dict[int, str]:
        """Return the first call sites of the modules that own parameters, by id of the parameter."""
        return self.list_by_parameter(self._uses)

    def list_by_parameter(self, values: Mapping[int, V]) -> dict[int, V]:
        """Return values of modules, given by id, by the ids of the parameters that the modules own."""
        return {
            id(parameter): values[id(module)]
            for owner in self.owners
            for module in owner.modules()
            for parameter in module.parameters(recurse=False)
            if id(module) in values
        }

    def learn(self, module: nn.Module) -> None:
        """Store the shards of a module. Call it while FSDP has not gathered its parameters."""
        for shard in self.name_shards(module):
            self._shards.setdefault(id(shard.tensor), shard)

    def name_shards(self, module: nn.Module) -> list[LocalShard]:
        """Return the shards of an outermost module under unique names.

        If the second model of a script shares a name with the first, all of its names get the prefix
        `model1.`. Models are numbered by their first forward passes, which have the same order in every run
        of the script.
        """
        shards = list(parameters(module))
        number = next(place for place, owner in enumerate(self.owners) if owner is module)
        if number not in self._prefixes:
            unknown = [shard.name for shard in shards if id(shard.tensor) not in self._shards]
            is_taken = any(self._owners.get(name, number) != number for name in unknown)
            self._prefixes[number] = f"model{number}." if is_taken else ""
            for name in unknown:
                self._owners.setdefault(self._prefixes[number] + name, number)
        prefix = self._prefixes[number]
        return [replace(shard, name=prefix + shard.name) for shard in shards] if prefix else shards

    def name_modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return an outermost module and all modules below it, with their names in the unwrapped model.

        Wrappers share the name of the module inside; only the innermost one, the script's own module, is
        returned.
        """
        self.name_shards(module)
        prefix = self._prefixes[next(place for place, owner in enumerate(self.owners) if owner is module)]
        found = {prefix + logical_name(name): each for name, each in module.named_modules()}
        return [(name.rstrip(".") or ROOT, each) for name, each in found.items()]

    def forget(self) -> None:
        """Drop all references to models, so that a script may free them."""
        self.roots.clear()
        self.owners.clear()
        self._shards.clear()
        self._fragments.clear()

    def find_names(self, optimizer: Optimizer) -> None:
        """Find the shards of the optimizer's parameters; name one outside all modules by its variable or group.

        FSDP1 replaces parameters while it runs, so all modules are searched again if a parameter is
        unknown. A module that was never called, but holds an unknown parameter, is searched too.
        """
        if not self._has_names:
            self._has_names = True
            self._join_owners()
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if wanted <= self._shards.keys() | self._fragments.keys():
            return
        for owner in self.owners:
            self.learn(owner)
        unknown: dict[str, Tensor] = {}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in self._shards or id(parameter) in self._fragments:
                    continue
                found = [
                    part
                    for owner in self.owners
                    for part in find_fragments(parameter, self.name_shards(owner))
                ]
                if found:
                    self._fragments[id(parameter)] = found
                else:
                    unknown[f"{type(optimizer).__name__}.group{number}.{place}"] = parameter
        for holder in find_holders(list(unknown.values())) if unknown else ():
            if not any(holder is owner for owner in self.owners):
                self.owners.append(holder)
                self.learn(holder)
        left = [parameter for parameter in unknown.values() if id(parameter) not in self._shards]
        taken = {shard.name for shard in self._shards.values()}
        names = name_by_variables(left) if left else {}
        names = {key: name for key, name in names.items() if name not in taken}
        for name, parameter in unknown.items():
            whole = LocalShard(names.get(id(parameter), name), parameter, Region.whole(parameter.shape))
            self._shards.setdefault(id(parameter), whole)

    def _join_owners(self) -> None:
        """Name parameters by the module that contains all roots, if there are several and it exists.

        A script that calls the layers of a model one by one makes each of them a root.
        """
        owner = find_owner(self.roots) if len(self.roots) > 1 else None
        if owner is None or any(owner is root for root in self.roots):
            return
        self.owners = [owner]
        self._shards.clear()
        self._owners.clear()
        self._prefixes.clear()
        self.learn(owner)

    def shards(self) -> list[LocalShard]:
        """Return the shards of all parameters of the model."""
        if not self._shards:
            for owner in self.owners:
                self.learn(owner)
        return list(self._shards.values())

    def shards_of(self, optimizer: Optimizer, number: int | None = None) -> list[LocalShard]:
        """Return the shards of an optimizer's parameters, or of one of its groups, each once.

        A flat partition has several shards, whose `LocalShard.tensor` is the partition.
        """
        groups = optimizer.param_groups if number is None else [optimizer.param_groups[number]]
        found: list[LocalShard] = []
        for parameter in (each for group in groups for each in group["params"]):
            own = self._shards.get(id(parameter))
            found += self._fragments.get(id(parameter), []) if own is None else [own]
        return [shard for shard in found if shard.region.numel]


def hash_rows(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of each row. Shapes: (rows, ...); returns (rows,) int64 on the CPU."""
    return sum_rows(tensor).cpu()


def sum_rows(tensor: Tensor) -> Tensor:
    """Return the hashes of `hash_rows` on the tensor's device, without waiting for it."""
    flat = tensor.detach().reshape(len(tensor), -1).contiguous()
    if flat.is_floating_point():
        flat = flat.view(_BITS[flat.element_size()])
    flat = flat.to(torch.int64)  # of one width, since runs may have other integer dtypes
    places = torch.arange(flat.shape[1], device=flat.device)
    return hash_words(flat, places).sum(dim=1)


def find_rows(frame: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the integer inputs (rows, ...) of the module call around a hook."""
    yield from ((name, each) for name, each in find_inputs(frame) if is_rows(each))


def find_inputs(frame: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors that the module call around a hook gets, alone or in a container.

    torch's global hooks do not receive keyword arguments, which models often use. They are read from the
    frame in which torch holds them while it calls its hooks.
    """
    for _ in range(_FRAMES):
        if frame is None:
            return
        values, named = frame.f_locals.get("args"), frame.f_locals.get("kwargs")
        if isinstance(values, tuple) and isinstance(named, dict):
            for name, each in (*enumerate(values), *named.items()):
                parts = [(f"{name}.{key}", part) for key, part in list_parts(each)]
                yield from (pair for pair in ((str(name), each), *parts) if isinstance(pair[1], Tensor))
            return
        frame = frame.f_back


def list_parts(value: Any) -> list[tuple[object, Any]]:
    """Return the elements of a container with their keys; a batch of transformers is a `UserDict`."""
    if isinstance(value, dict | UserDict):
        return list(value.items())
    return list(enumerate(value)) if type(value) in (list, tuple) else []


def is_rows(value: Tensor) -> bool:
    """Return whether a tensor has integer rows."""
    return value.ndim > 1 and not value.is_floating_point() and not value.is_complex()


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters; a loss function or a transform of the data has none."""
    return next(module.parameters(), None) is not None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside of wrappers, which have one child and no tensors of their own.

    A script may set the mode of the module alone.
    """
    while len(children := list(module.children())) == 1 and not module._parameters and not module._buffers:
        module = children[0]
    return module


def list_dropouts(module: nn.Module, *, trains: bool) -> list[_DropoutNd]:
    """Return the dropout modules of a model that are in training mode, or those that are not."""
    modules = (each for each in module.modules() if isinstance(each, _DropoutNd))
    return [each for each in modules if each.p > 0 and each.training is trains]


def find_dropout(module: nn.Module) -> Iterator[str]:
    """Yield a description of the active dropout modules, if a model has any."""
    active = list_dropouts(module, trains=True)
    if active:
        yield f"{len(active)} modules with p up to {max(each.p for each in active):g}"


def compute_dtype(inputs: tuple[Any, ...]) -> str:
    """Return the 16-bit dtype that an inner module computes in, or an empty string."""
    for each in inputs:
        if isinstance(each, Tensor) and each.dtype in _NARROW:
            return str(each.dtype).removeprefix("torch.")
        if isinstance(each, Tensor) and torch.is_autocast_enabled(each.device.type):
            return str(torch.get_autocast_dtype(each.device.type)).removeprefix("torch.")
    return ""


def is_number(tensor: Tensor) -> bool:
    """Return whether a tensor is one real number."""
    return tensor.numel() == 1 and tensor.is_floating_point()


def find_owner(modules: Sequence[nn.Module]) -> nn.Module | None:
    """Return the outermost module that contains all of `modules`, or None; the largest one if several do."""
    wanted = {id(module) for module in modules}
    return _choose(each for each in _list_outermost() if wanted <= {id(part) for part in each.modules()})


def find_holders(parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Return outermost modules that hold these parameters, the largest ones if several hold the same."""
    missing = {id(parameter) for parameter in parameters}
    held = [(each, {id(own) for own in each.parameters()}) for each in _list_outermost()]
    found: list[nn.Module] = []
    for module, own in sorted(held, key=lambda pair: -len(pair[1])):
        if missing & own:
            found.append(module)
            missing -= own
    return found


def _choose(owners: Iterator[nn.Module]) -> nn.Module | None:
    return max(owners, key=lambda owner: sum(1 for _ in owner.parameters()), default=None)


def _list_outermost() -> list[nn.Module]:
    # `type` instead of `isinstance`: proxies answer the latter with code of their own.
    everything = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for each in everything for child in vars(each).get("_modules", {}).values()}
    return [each for each in everything if id(each) not in inner]


def find_fragments(partition: Tensor, shards: Sequence[LocalShard]) -> Iterator[LocalShard]:
    """Yield the part of each parameter in a flat partition; nothing if it is not a ZeRO partition.

    Shapes: `partition` is (elements of all parameters of a group / ranks,), padded at its end.
    """
    storage = partition.untyped_storage().data_ptr()
    for shard in shards:
        mapping = getattr(shard.tensor, "_hp_mapping", None)
        if mapping is None or mapping.hp_fragment is None:
            continue
        if mapping.hp_fragment.untyped_storage().data_ptr() != storage:
            continue
        own, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        region = Region.run(shard.region.shape, own.start, own.start + own.numel)
        view = partial(_narrow, start=flat.start, length=flat.numel)
        yield LocalShard(shard.name, partition, region, view)


def _narrow(tensor: Tensor, *, start: int, length: int) -> Tensor:
    return tensor.reshape(-1).narrow(0, start, length)
