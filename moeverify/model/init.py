"""Initial values of parameters and buffers as a function of seed, name and global index.

The function uses only integer operations, exact conversions, and single multiplications and additions. A
value is therefore bitwise equal on any device, vectorized or not, and for a slice or the whole tensor.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from moeverify.cases.schema import ReferenceModel
from moeverify.hashing import hash_counter, in_chunks, key_of
from moeverify.seams import seam

IDLE_BIAS = -2.0
"""Selection bias of an idle expert: scores lie in (0, 1), so every other expert is preferred."""

_RESIDUAL = ("o_proj", "down_proj", "down", "down_bias")

_CHUNK = 2**22  # elements per chunk, to bound the memory of the index

# Four independent uniform integers below 2^16: the mean and standard deviation of their sum.
_MEAN = 4 * (2**16 - 1) // 2
_DEVIATION = math.sqrt(4 * (2**32 - 1) / 12)


@seam
def draw(seed: int, name: str, flat_index: Tensor) -> Tensor:
    """Return one approximately normal number (mean 0, variance 1) for each index of the tensor `name`.

    A number is a sum of four uniform numbers, so no value exceeds 3.47 standard deviations. Transcendental
    functions are avoided because their last bit differs between devices.

    Shapes: flat_index any, int64.
    Returns: float64 in the same shape, on the same device.
    """
    return in_chunks(partial(_draw, key_of("init", seed, name)), flat_index)


def _draw(key: int, flat_index: Tensor) -> Tensor:
    bits = hash_counter(key, flat_index)
    total = bits & 0xFFFF
    for shift in (16, 32, 48):
        total = total + ((bits >> shift) & 0xFFFF)
    return (total - _MEAN).to(torch.float64) * (1.0 / _DEVIATION)


def initial_values(
    spec: ReferenceModel, seed: int, name: str, shape: tuple[int, ...], flat_index: Tensor
) -> Tensor:
    """Return the initial values at these indices of the logical tensor `name`.

    Shapes: `shape` is global; `flat_index` (int64, any shape) indexes it in row-major order.
    Returns: float64 in the shape and on the device of `flat_index`.
    """
    if name.endswith("selection_bias"):
        num_idle = 0 if spec.moe is None else spec.moe.idle_experts
        return (flat_index >= shape[0] - num_idle).to(torch.float64) * IDLE_BIAS
    values = draw(seed, name, flat_index)
    if name.endswith("norm.weight"):
        return values * 0.1 + 1.0
    return values * choose_deviation(spec, name, shape)


def choose_deviation(spec: ReferenceModel, name: str, shape: tuple[int, ...]) -> float:
    """Return the standard deviation of the initial elements of a bias or a matrix.

    A matrix has `init_std`, but at least 1 / sqrt(fan-in). With 0.02 in a narrow model, biases would
    dominate the tokens, all tokens would go to the same experts, and attention would be uniform. The fan-in
    of a lookup is 1, unless the embedding is also the head. A router always has 1 / sqrt(fan-in), so that
    its logits vary at every width. Parameters that write to the residual stream are divided by sqrt(2 *
    num_layers) (Radford et al. 2019, section 2.3).
    """
    lookup = name == "embed.weight" and not spec.tie_embedding
    natural = 1.0 if lookup else 1.0 / math.sqrt(shape[-1])
    if name.endswith("bias"):
        deviation = 0.1
    elif name.endswith("router.weight"):
        deviation = natural
    else:
        deviation = max(spec.init_std, natural)
    writes_residual = any(part in _RESIDUAL for part in name.split("."))
    return deviation / math.sqrt(2 * spec.num_layers) if writes_residual else deviation


@torch.no_grad()
def initialize(model: nn.Module, spec: ReferenceModel, seed: int) -> None:
    """Fill every parameter and buffer of a whole model; a tied weight is filled once."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        fill(tensor, spec, seed, name)


@torch.no_grad()
def fill(
    tensor: Tensor, spec: ReferenceModel, seed: int, name: str, rounded_to: torch.dtype = torch.float64
) -> None:
    """Fill the whole logical tensor `name` with its initial values, rounded from float64 to `rounded_to`."""
    flat = tensor.view(-1)
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        index = torch.arange(start, start + len(chunk), device=tensor.device)
        chunk.copy_(initial_values(spec, seed, name, tuple(tensor.shape), index).to(rounded_to))
