"""Dtypes in which the first step of a run computes, reduces and stores, as observed on this rank.

The outputs of modules and their residual streams are included (`module_dtypes`). If one of them is wrong, the
second step shows the line that makes it.

The compute dtype of a parameter is its dtype when the forward pass of its module begins: FSDP has gathered
it then. If that dtype is wide, the module or autocast may still narrow it in the forward pass, so casts are
watched too. Compiled code is not watched, because watching would change the compiled code.

The reduction dtype of a gradient is the dtype of the last collectives that FSDP2 issued before it handed
over the reduced gradient. DDP and FSDP1 hand over gradients at other times, so no reduction dtype is
reported for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.results.facts import DtypeUse
from moeverify.results.trace import CollectiveRecord
from moeverify.train.module_taps import hook_gradient
from moeverify.verification.checks.base import Watch
from moeverify.verification.checks.module_dtypes import ModuleDtypes, find_caller, find_line
from moeverify.verification.checks.narrower import dtype_called, is_narrower, name_dtype

_KEPT: Mapping[str, DtypeUse] = {
    Kind.WEIGHT: DtypeUse.WEIGHT,
    Kind.GRADIENT: DtypeUse.GRADIENT,
    Kind.OPTIMIZER_STATE: DtypeUse.OPTIMIZER_STATE,
}
_OF_MODULES = (DtypeUse.OUTPUT, DtypeUse.RESIDUAL)
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)  # their own forward pass is never called

Issued = Callable[[int], Sequence[CollectiveRecord]]
"""Map the number of a collective to the records of those that this rank issued since, oldest first."""


@dataclass(frozen=True)
class Sighting:
    """The dtype in which a rank used a parameter. `how` names the collective or the moment, or is empty.

    For the output of a module, `parameter` is the FQN of the module and `how` the place in the output. For
    its residual stream, `dtype` is the dtype of the output and `how` the wider dtype before the cast. For an
    operator, `parameter` is the module or the function of a user's step, `how` its name, and `dtype` its widest
    result.
    `site` is the line that made the tensor, if known.
    """

    use: DtypeUse
    parameter: str
    dtype: str
    how: str = ""
    site: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Return use, parameter and further detail, without the dtype."""
        return self.use, self.parameter, self.how


@dataclass(frozen=True)
class ParameterSlot:
    """Location of a parameter (module and attribute), its logical name, and the tensor stored there."""

    owner: nn.Module
    attribute: str
    name: str
    stored: Tensor


class DtypeWatch(Watch[list[Sighting]]):
    """Watches the dtypes of the first step, and reports each use of a parameter by collective or moment.

    `compute` is the intended compute dtype. A parameter that already has it is not watched for casts. If
    `is_wrong` holds for an output or a residual stream, the second step finds its line. `sees_operators` adds
    the operators of the modules' forward passes, and with `has_own_step` those of a user's step.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: torch.dtype,
        issued: Issued,
        is_wrong: Callable[[Sighting], bool] = lambda sighting: False,
        *,
        sees_operators: bool = False,
        has_own_step: bool = False,
    ) -> None:
        # Dropped once the hooks are set for the last time, so that the watch does not keep the model alive.
        self._model: nn.Module | None = model
        self._compute = compute
        self._issued = issued
        self._is_wrong = is_wrong
        self._sees_operators, self._has_own_step = sees_operators, has_own_step
        self._modules: ModuleDtypes | None = None
        self._traces = False
        self._number = 0
        self._issued_last: Sequence[CollectiveRecord] = ()
        self._sightings: dict[tuple[DtypeUse, str, str], Sighting] = {}
        self._handles: list[RemovableHandle] = []
        self._watched: dict[nn.Module, _Casts] = {}
        self._awaited: set[int] = set()

    def report(self) -> list[Sighting]:
        """Return the sightings; see `Watch`."""
        return list(self._sightings.values())

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Record the dtype of stored values; see `Watch`."""
        if self._has_own_step and self._modules is not None and kind in (Kind.LOSS, Kind.GRADIENT):
            self._modules.leave_step()
        use = _KEPT.get(kind)
        if use is not None and step == 0 and local is not None and local.is_floating_point():
            parameter, _, key = name.rpartition(".") if kind == Kind.OPTIMIZER_STATE else (name, "", "")
            self._note(use, parameter, local.dtype, key)

    def begin_step(self, step: int) -> None:
        """Watch the first step, and the second one for lines; see `Watch`."""
        model = self._model
        self.close()
        if model is None:
            return
        if not self._sightings:
            self._model = model
            self._open(model)
            note = self._note_operator if self._sees_operators else None
            self._modules = ModuleDtypes(model, self._note_module, note)
            if self._has_own_step:
                self._modules.enter_step()
        elif any(each.use in _OF_MODULES and self._is_wrong(each) for each in self._sightings.values()):
            self._traces = not torch.is_anomaly_enabled()
            torch.autograd.set_detect_anomaly(True, check_nan=False)
            self._modules = ModuleDtypes(model, self._add_line)

    def close(self) -> None:
        """Stop watching and release the model; see `Watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self._watched:  # forward passes that raised
            self._watched.popitem()[1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._modules is not None:
            self._modules.close()
        if self._traces:
            torch.autograd.set_detect_anomaly(False)
        self._modules, self._model, self._traces = None, None, False

    def _note_module(self, use: DtypeUse, name: str, dtype: torch.dtype, how: str, node: Node | None) -> None:
        """Keep the narrowest dtype of each output: a module may run more than once."""
        known = self._sightings.get((use, name, how))
        if known is None or is_narrower(dtype, dtype_called(known.dtype)):
            self._note(use, name, dtype, how)

    def _note_operator(self, module: str | None, operator: str, dtype: torch.dtype) -> None:
        """Keep the widest dtype of each operator of a module or a function of a user's step.

        Other numbers of the same module may be computed in a narrow dtype.
        """
        place = find_caller()[0] if module is None else module
        known = self._sightings.get((DtypeUse.OPERATOR, place, operator))
        is_new = known is None or is_narrower(dtype_called(known.dtype), dtype)
        if is_new and (place or module is not None):
            found = Sighting(DtypeUse.OPERATOR, place, name_dtype(dtype), operator)
            site = find_caller()[1] if self._is_wrong(found) else ""
            self._sightings[DtypeUse.OPERATOR, place, operator] = replace(found, site=site)

    def _add_line(self, use: DtypeUse, name: str, dtype: torch.dtype, how: str, node: Node | None) -> None:
        """Add the line of a tensor to the sighting of the first step."""
        known = self._sightings.get((use, name, how))
        if known is not None and not known.site and known.dtype == name_dtype(dtype):
            self._sightings[use, name, how] = replace(known, site=find_line(node))

    def _open(self, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            slots = list(list_slots(prefix, module))
            if slots:
                self._handles.append(module.register_forward_pre_hook(self._make_pre_hook(slots)))
                # Without `always_call`: with it torch compiles each module anew, up to its limit.
                self._handles.append(module.register_forward_hook(self._end_forward))

    def _make_pre_hook(self, slots: Sequence[ParameterSlot]) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if torch.compiler.is_compiling():
                return  # the compiled code must be the same as without a watch
            wide: dict[int, str] = {}
            for slot in slots:
                if (DtypeUse.COMPUTES, slot.name, "") in self._sightings:
                    continue  # a later micro-batch, or a recomputation
                used = getattr(slot.owner, slot.attribute)
                self._note(DtypeUse.COMPUTES, slot.name, used.dtype)
                if used is not slot.stored:
                    self._await_reduction(slot, used)
                if used.dtype != self._compute:
                    wide[local_part(used).data_ptr()] = slot.name
            if wide and module not in self._watched:
                self._watched[module] = _Casts(wide, self._narrow)
                self._watched[module].__enter__()  # type: ignore[no-untyped-call]

        return hook

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mode = self._watched.pop(module, None)
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _narrow(self, name: str, dtype: torch.dtype) -> None:
        if dtype == self._compute:
            self._note(DtypeUse.COMPUTES, name, dtype)

    def _await_reduction(self, slot: ParameterSlot, used: Tensor) -> None:
        """Record the collectives when FSDP2 hands over the gradient of a gathered parameter."""
        if not (isinstance(slot.stored, DTensor) and slot.stored.requires_grad):
            return
        if id(slot.stored) in self._awaited:
            return
        inner, shape = _list_groups(used), tuple(local_part(used).shape)
        outer = _list_groups(slot.stored) - inner
        partial: set[str] = set()  # groups over which its gradient is a partial sum

        def look(gradient: Tensor) -> None:
            partial.update(_list_partial(gradient, slot.stored))

        def hook(_: Tensor) -> None:
            new = self._issued(self._number)
            if new:  # else it was reduced together with the previous parameter
                self._number = new[-1].number
                self._issued_last = new
            for record in _find_reductions(self._issued_last, outer, inner, partial, shape):
                over = f" over {record.axis}" if record.axis else ""
                self._note(DtypeUse.REDUCES, slot.name, record.dtype, f"{record.op}{over}")

        self._awaited.add(id(slot.stored))
        if used.requires_grad:
            self._handles.append(hook_gradient(used, look))
        handle = slot.stored.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    def _note(self, use: DtypeUse, name: str, dtype: torch.dtype | str, how: str = "") -> None:
        self._sightings[use, name, how] = Sighting(use, name, str(dtype).removeprefix("torch."), how)


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for casts of tensors, given by their data pointers. `on_cast` gets the name and new dtype."""

    def __init__(self, names: Mapping[int, str], on_cast: Callable[[str, torch.dtype], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._on_cast = on_cast

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            name = self._names.get(local_part(args[0]).data_ptr())
            if name is not None:
                self._on_cast(name, result.dtype)
        return result


def list_slots(prefix: str, module: nn.Module) -> Iterator[ParameterSlot]:
    """Yield the parameters that a module itself computes with."""
    if isinstance(module, _CONTAINERS):
        return
    owners = [("", module)]
    owners += [
        (f"{name}.", child) for name, child in module.named_children() if isinstance(child, _CONTAINERS)
    ]
    for inner, owner in owners:
        for attribute, parameter in owner.named_parameters(recurse=False):
            if parameter.is_floating_point():
                yield ParameterSlot(owner, attribute, logical_name(f"{prefix}.{inner}{attribute}"), parameter)


def _list_groups(tensor: Tensor) -> set[str]:
    """Return the names of the groups over which a tensor is sharded or replicated."""
    if not isinstance(tensor, DTensor):
        return set()
    mesh = tensor.device_mesh
    return {mesh.get_group(dim).group_name for dim in range(mesh.ndim)}


def _list_partial(gradient: Tensor, stored: Tensor) -> set[str]:
    """Return the names of the groups over which a gradient is partial and its parameter is replicated."""
    if not (isinstance(gradient, DTensor) and isinstance(stored, DTensor)):
        return set()
    meshes = gradient.device_mesh, stored.device_mesh
    kept = {meshes[1].get_group(dim).group_name: each for dim, each in enumerate(stored.placements)}
    named = ((meshes[0].get_group(dim).group_name, each) for dim, each in enumerate(gradient.placements))
    return {name for name, each in named if each.is_partial() and name in kept and kept[name].is_replicate()}


def _find_reductions(
    records: Sequence[CollectiveRecord],
    outer: set[str],
    inner: set[str],
    partial: set[str],
    shape: tuple[int, ...],
) -> Iterator[CollectiveRecord]:
    """Yield the collectives that reduced the gradient of a parameter, newest first.

    FSDP2 all-reduces each gradient over `inner`, the tensor-parallel mesh, if it is `partial` there. Then
    it reduce-scatters all gradients at once over `outer`; in HSDP it also all-reduces the shards. Earlier
    records are collectives of the backward pass, over other groups or the same ones. An activation may have
    the shape of a parameter, if there are as many tokens as the parameter has rows.
    """
    left = list(records)
    for label in ("all_reduce", "reduce_scatter"):
        if left and left[-1].op.startswith(label) and left[-1].group_name in outer:
            yield left.pop()
    awaited = set(partial)
    while awaited and left and left[-1].op.startswith("all_reduce") and left[-1].group_name in inner:
        record = left.pop()
        if record.shape == shape and record.group_name in awaited:
            awaited.remove(record.group_name)
            yield record
