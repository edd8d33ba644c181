"""Linear layers in float8 by torchao.

They are converted before any other parallelism, and sharded over tp by torchao's styles.

A layer keeps its weight in the dtype of the recipe. Operands are scaled and rounded anew for every product,
so FSDP2, DDP and pipelines treat it as an ordinary linear layer. Under tp the operands are DTensors, and
the largest element of a sharded operand is taken over all tp ranks. It is not taken over data-parallel
ranks.

Where no float8 kernel exists (CPU, GPU below compute capability 8.9, dtype other than bfloat16), torchao
emulates: operands are rounded the same way and multiplied in float32.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from moeverify.model.float8 import list_layers
from moeverify.seams import seam

_FIRST_CAPABILITY = (8, 9)


@seam
def apply_float8(model: nn.Module, float8: str, device: torch.device, compute: torch.dtype) -> None:
    """Replace the layers that use float8 with torchao's, in place; `compute` is the dtype of products.

    The model must be unsharded and on the meta device.
    """
    if float8 == "none":
        return
    library = _import_torchao()
    config = library.Float8LinearConfig.from_recipe_name(float8)
    # The kernels need inner dims that are multiples of 16, and the number of tokens per rank is not under
    # our control.
    config = replace(config, emulate=not has_kernels(device, compute), pad_inner_dim=True)
    chosen = {name for name, _, _ in list_layers(model)}
    library.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)


def has_kernels(device: torch.device, compute: torch.dtype) -> bool:
    """Return whether a device has float8 kernels with results in dtype `compute`."""
    if device.type != "cuda" or compute != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def columns(linear: nn.Module) -> ParallelStyle:
    """Return the style that shards the outputs of a linear layer.

    Float8 operands with a single scale are communicated in float8, together with the scale.
    """
    if not _has_one_scale(linear):
        return ColwiseParallel()
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel

    style: ParallelStyle = Float8ColwiseParallel()
    return style


def rows(linear: nn.Module, outputs: Placement) -> ParallelStyle:
    """Return the style that shards the inputs of a linear layer, with its output placed as `outputs`."""
    if not _has_one_scale(linear):
        return RowwiseParallel(output_layouts=outputs)
    from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel

    style: ParallelStyle = Float8RowwiseParallel(output_layouts=outputs)
    return style


def unpack(tensor: Tensor) -> Tensor:
    """Return the values of a float8 operand in its original dtype; return any other tensor unchanged.

    The shape and, for a DTensor, the placements are preserved.
    """
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        numbers = unpack(local)
        if numbers is local:
            return tensor
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(
            numbers, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
        )
    widen_operand = getattr(tensor, "to_original_precision", None)
    numbers = tensor if widen_operand is None else widen_operand()
    assert isinstance(numbers, Tensor)
    return numbers


def _has_one_scale(linear: nn.Module) -> bool:
    config = getattr(linear, "config", None)
    granularity = getattr(getattr(config, "cast_config_input", None), "scaling_granularity", None)
    return getattr(granularity, "value", None) == "tensorwise"


@cache
def _import_torchao() -> Any:
    """Return `torchao.float8`, patched to emulate in float64 when its operands were float64."""
    log = logging.getLogger("torchao")
    level = log.level
    log.setLevel(logging.CRITICAL)  # torchao warns about kernels for other chips that it could not load
    try:
        import torchao.float8
    finally:
        log.setLevel(level)
    _emulate_in_float64()
    return torchao.float8


def _emulate_in_float64() -> None:
    """Patch torchao's emulation to multiply in float64 where its operands were float64.

    Unpatched, it always multiplies in float32. Two devices then differ by about 1e-7. Occasionally that
    moves an operand of the next layer across the midpoint between two float8 numbers, an error of about
    1e-3. No bound on the layout could then be tight.
    """
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    mm = torch.ops.aten.mm.default
    emulate = FLOAT8_OPS_TABLE[mm]

    def multiply(op: Any, args: Any, kwargs: Any = None) -> Tensor:
        if any(getattr(arg, "_orig_dtype", None) != torch.float64 for arg in args):
            product: Tensor = emulate(op, args, kwargs)
            return product
        left, right = (arg._data.to(torch.float64) / arg._scale.to(torch.float64) for arg in args)
        exact: Tensor = left @ right
        return exact

    FLOAT8_OPS_TABLE[mm] = multiply
