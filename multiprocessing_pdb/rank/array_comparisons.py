"""Comparisons of the types of torch and numpy: tensors of every layout, modules, optimizers, generators."""

from __future__ import annotations

import gc
import sys
from typing import Any

from multiprocessing_pdb.rank import tensors
from multiprocessing_pdb.rank.comparisons import NotComparedError, Parts, State, compares, list_attributes

# Attributes in which torch keeps what is compared as parts, or counts the tensors of a process.
_OF_DTENSOR = ("._local_tensor", "._spec")
_OF_NESTED = (
    *("._size", "._strides", "._ragged_idx", "._metadata_cache"),
    *("._values", "._offsets", "._lengths"),
)
_STORES = ("_parameters", "_buffers", "_modules")


@compares("torch.masked.maskedtensor.core.MaskedTensor", has_attributes=True)
def _split_masked(value: Any) -> State:
    return State(parts=[(".get_data()", value.get_data()), (".get_mask()", value.get_mask())])


@compares("torch.Tensor", has_attributes=True)
def _split_tensor(value: Any) -> State:
    """Split into dense tensors, the gradient of a leaf and attributes."""
    is_sharded = tensors.get_local(value) is not value
    private = _OF_DTENSOR if is_sharded else _OF_NESTED if value.is_nested else ()
    parts = [(name, part) for name, part in list_attributes(value) if name not in private]
    if value.is_leaf and value.grad is not None:
        parts.append((".grad", value.grad))
    dense = None if is_sharded else _divide(value)
    if dense is None:
        if not tensors.has_data(tensors.get_local(value)):
            raise NotComparedError("has no elements that can be read")
        return State(array=value, parts=parts)
    form = f"{value.dtype} {value.layout} {value.device.type} {value.requires_grad}"
    return State(form.encode(), parts=[*dense, *parts])


def _divide(value: Any) -> Parts | None:
    """Return the parts of a tensor that is not one dense block of memory, or None for one that is."""
    import torch

    value = value.detach()
    if value.is_nested:
        parts = [(f".unbind()[{at}]", part) for at, part in enumerate(value.unbind())]
        return [(".dim()", value.dim()), *parts]
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        if not hasattr(value, "__tensor_flatten__"):
            raise NotComparedError  # its elements are wherever its class keeps them
        names, context = value.__tensor_flatten__()
        parts = [(f".{name}", getattr(value, name)) for name in names]
        return [(".shape", tuple(value.shape)), *parts, (".context", context)]
    if value.layout != torch.strided:
        return [(".shape", tuple(value.shape)), *_list_sparse(value)]
    if value.is_quantized:
        return [(".int_repr()", value.int_repr()), *_list_scales(value)]
    if value.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        return [(".view(torch.uint8)", value.view(torch.uint8))]
    return None


def _list_sparse(value: Any) -> Parts:
    import torch

    if value.layout == torch.sparse_coo:
        return _call(value.coalesce(), "indices", "values")  # the same values in another order are equal
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _call(value, "crow_indices", "col_indices", "values")
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _call(value, "ccol_indices", "row_indices", "values")
    raise NotComparedError


def _call(value: Any, *names: str) -> Parts:
    return [(f".{name}()", getattr(value, name)()) for name in names]


def _list_scales(value: Any) -> Parts:
    import torch

    scheme = value.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return _call(value, "qscheme", "q_scale", "q_zero_point")
    return _call(value, "qscheme", "q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")


@compares("torch.storage.UntypedStorage", "torch.storage.TypedStorage", has_attributes=True, is_whole=True)
def _split_storage(value: Any) -> State:
    import torch

    octets = torch.empty(0, dtype=torch.uint8, device=value.device)
    untyped = getattr(value, "_untyped_storage", value)
    return State(str(getattr(value, "dtype", "")).encode(), parts=[(".bytes", octets.set_(untyped))])


@compares("torch._C.Generator", is_whole=True)
def _split_generator(value: Any) -> State:
    parts: Parts = [(".device", value.device), (".initial_seed()", value.initial_seed())]
    return State(parts=[*parts, (".get_state()", value.get_state())])


@compares("torch.nn.modules.module.Module", has_attributes=True)
def _split_module(module: Any) -> State:
    """Split into parameters, buffers, submodules in their order, hooks, and all other attributes."""
    own = {name.removeprefix("."): part for name, part in list_attributes(module)}
    parts: Parts = [(f".{name}", part) for store in _STORES for name, part in own.get(store, {}).items()]
    order = [list(own.get(store, {})) for store in _STORES]
    for name, part in own.items():
        if name.endswith("_hooks") or "_hooks_" in name:
            parts += [(f".{name}", list(part.values()))] if part else []  # keys are a process's counter
        elif name not in _STORES:
            parts.append((f".{name}", part))
    tied = _find_tied(module)
    return State(repr(order).encode(), parts=[*parts, (".tied", tied)] if tied else parts)


def _find_tied(module: Any) -> list[list[str]]:
    """Return the names of each tensor that has more than one."""
    names: dict[int, list[str]] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return sorted(found for found in names.values() if len(found) > 1)


@compares("torch.optim.optimizer.Optimizer", has_attributes=True)
def _split_optimizer(optimizer: Any) -> State:
    """Split into groups, parameters and states, under the parameters' names in the models that live."""
    known = _name_parameters()
    parts: Parts = []
    names: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        prefix = f".param_groups[{number}]"
        parts.append((prefix, {key: part for key, part in group.items() if key != "params"}))
        for at, parameter in enumerate(group["params"]):
            name = names[id(parameter)] = known.get(id(parameter), f"{number}.{at}")
            parts.append((f"{prefix}['params'][{name}]", parameter))
    for at, (parameter, state) in enumerate(optimizer.state.items()):
        parts.append((f".state[{names.get(id(parameter), f'#{at}')}]", state))
    shown = {".param_groups", ".state"}
    for name, part in list_attributes(optimizer):
        is_hooks = name.endswith("_hooks")
        if name not in shown and (part or not is_hooks):
            parts.append((name, list(part.values()) if is_hooks else part))
    return State(repr(list(names.values())).encode(), parts=parts)


def _name_parameters() -> dict[int, str]:
    """Return the longest qualified name of each parameter in any live module, by the parameter's id."""
    module = getattr(sys.modules.get("torch.nn"), "Module", None)
    names: dict[int, str] = {}
    for found in gc.get_objects():
        if module and issubclass(type(found), module):  # isinstance would evaluate lazy objects
            for name, parameter in found.named_parameters():
                if len(name) > len(names.get(id(parameter), "")):
                    names[id(parameter)] = name
    return names


@compares("numpy.ma.MaskedArray", "numpy.ma.core.MaskedArray", has_attributes=True)
def _split_masked_array(value: Any) -> State:
    parts = [(f".{name}", getattr(value, name)) for name in ("data", "mask", "fill_value")]
    ignored = {"._mask", "._fill_value", "._data"}
    return State(parts=[*parts, *(part for part in list_attributes(value) if part[0] not in ignored)])


@compares("numpy.ndarray")
def _split_array(value: Any) -> State:
    value = value.view(sys.modules["numpy"].ndarray)  # a matrix reshapes otherwise
    if tensors.has_data(value):
        return State(array=value)
    if value.dtype.names:
        fields: Parts = [(f"[{name!r}]", value[name]) for name in value.dtype.names]
        return State(f"{value.dtype.descr} {value.shape}".encode(), parts=fields)
    items: Parts = [(f"[{at}]", child) for at, child in enumerate(value.flat)]
    return State(f"{value.shape}".encode(), parts=items)


@compares("numpy.dtype", is_whole=True)
def _split_dtype(value: Any) -> State:
    return State(repr((value.descr if value.names else value.str, value.metadata)).encode(), repr(value))


@compares("torch.distributed.device_mesh.DeviceMesh", has_attributes=True)
def _split_mesh(value: Any) -> State:
    names = ("device_type", "mesh_dim_names", "mesh")
    return State(parts=[(f".{name}", getattr(value, name)) for name in names])
