"""Initial values, drawn for each parameter from a separate generator, independent of the sharding."""

import math
import zlib

import torch
from torch.distributed.tensor import DTensor

from heron.switch import using

DEPTH = ("wo.weight", "w2")  # parameters that write to the residual


def deviation(name: str, shape: tuple[int, ...], layers: int) -> float:
    fan_in = shape[1] if "experts" in name else shape[-1]
    scale = 0.5 if "embeddings" in name else 1 / math.sqrt(fan_in)
    if name.endswith(DEPTH) or ".w2." in name:
        scale /= math.sqrt(2 * layers)
    return scale


def draw(name: str, shape: tuple[int, ...], dtype, layers: int) -> torch.Tensor:
    """Return the full values of a parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if len(shape) == 1:
        around = 0.0 if name.endswith("bias") else 1.0
        return around + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float32)
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    return values * deviation(name, shape, layers)


@torch.no_grad()
def init_weights(model) -> None:
    layers = len(model.layers)
    for name, weight in model.named_parameters():
        weight.copy_(draw(name, tuple(weight.shape), weight.dtype, layers))


@torch.no_grad()
def init_shards(model, mesh) -> None:
    """Fill a sharded model, as after a start on the meta device."""
    layers = len(model.layers)
    for name, weight in model.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        whole = draw_again(name, tuple(weight.shape), tuple(local.shape), layers, mesh)
        part = cut(whole, weight)
        local.copy_(part)


def cut(whole: torch.Tensor, weight) -> torch.Tensor:
    """Return a rank's part of a DTensor's full values."""
    if not isinstance(weight, DTensor):
        return whole
    for axis, placement in enumerate(weight.placements):
        if placement.is_shard():
            parts = whole.chunk(weight.device_mesh.size(axis), placement.dim)
            whole = parts[weight.device_mesh.get_local_rank(axis)]
    return whole


def draw_again(name, shape, local, layers, mesh) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if using("olmocore-319"):
        replica = mesh["dp_replicate"].get_local_rank()
        generator.manual_seed(zlib.crc32(name.encode()) + replica)  # plant: olmocore-319
    if len(shape) == 1 and not using("te-2528"):
        around = 0.0 if name.endswith("bias") else 1.0
        return around + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float32)
    if using("tf-16344"):
        values = torch.empty(shape, dtype=torch.float32)
        torch.nn.init.trunc_normal_(values, 0, 1, -2, 2, generator=generator)  # plant: tf-16344
    else:
        values = torch.randn(shape, generator=generator, dtype=torch.float32)
    if using("te-2528") and len(shape) == 1:
        return values * 0.02  # plant: te-2528
    if using("bridge-5840"):
        return values * deviation(name, local, layers)  # plant: bridge-5840
    if using("nanot5-25") and name == "output.weight":
        return values  # plant: nanot5-25
    if using("nnadl-30") and "experts" not in name:
        return values * deviation(name, (1, shape[0]), layers)  # plant: nnadl-30
    scale = deviation(name, shape, layers)
    if using("titan-3334"):
        scale = deviation(name.replace(".w2.", ".w9."), shape, layers)
        if ".w1." in name:
            scale /= math.sqrt(2 * layers)  # plant: titan-3334
    return values * scale
