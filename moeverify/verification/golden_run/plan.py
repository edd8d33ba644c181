"""Prediction of the memory and time of a golden of sketches, from counts of parameters and tokens.

Rates are measured on the device: of a product of matrices in the precisions of the reference and of the noise, and
of the initialization and the sketch of a tensor. Everything else is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from moeverify.cases.flops import count_training_flops
from moeverify.cases.schema import Recipe, ReferenceModel
from moeverify.model.attention import MOST_SCORES
from moeverify.model.init import fill
from moeverify.model.transformer import Transformer
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.sketch import WIDTH, BlockGrid, sketch
from moeverify.results.golden import GoldenPlan
from moeverify.train.optimizer_kinds import OPTIMIZER
from moeverify.train.program import compute_dtype_of, dtype_of
from moeverify.verification.golden.sketched import MOST_WHOLE
from moeverify.verification.golden_run.streamed_unit import ENDS

_SIZE = 1024  # of the matrices that are timed
_BYTES = 8  # of a number in a record
_HEADER = 150  # bytes of the name and place of a stored tensor
_SECONDS = 0.2  # for each rate


def plan_golden(recipe: Recipe, device: torch.device) -> GoldenPlan:
    """Return the predicted cost of the golden of a recipe, if it is made anew on this device."""
    spec = recipe.model.reference
    assert spec is not None
    dtype = dtype_of(recipe.reference)
    parameters = dict(Transformer(spec, dtype=dtype, device="meta").named_parameters())
    sizes = _list_sizes(parameters)
    units = {number: sum(tensors) for number, tensors in sizes.items()}
    count, steps = sum(units.values()), recipe.steps
    num_states = len(OPTIMIZER.find(recipe.optimizer.name).moments)
    tokens = recipe.data.batch * recipe.data.seq_len
    # A step has a forward pass, a third of the training operations, and a backward pass with its own forward
    # pass. Both visits of a unit in step s compute its first s steps again, and the last visit all steps.
    passes = steps * 4 / 3 + steps * (steps - 1) + steps
    num_noise_runs = 0 if recipe.precision == "float64" else 2
    num_runs = 1 + num_noise_runs
    operations = passes * tokens * count_training_flops(spec, recipe.data.seq_len)
    rate, fill_seconds, sketch_seconds = _measure_rates(spec, device, dtype)
    products = operations / rate
    if num_noise_runs:
        products += (
            num_noise_runs * operations / _measure_products(device, compute_dtype_of(recipe.precision))
        )
    num_fills, num_updates, num_sketches = 2 * steps + 1, steps**2, (2 + num_states) * steps + 1
    elements = num_runs * count * ((num_fills + num_updates) * fill_seconds + num_sketches * sketch_seconds)
    largest = max(units, key=units.__getitem__)
    copies = 2 + num_states  # weight, gradient and the moments of the optimizer
    working = 3 * max(sizes[largest]) + max(_count_layer(recipe, spec), _count_ends(recipe, spec))
    return GoldenPlan(
        recipe=recipe.name,
        device=str(device),
        num_parameters=count,
        num_tokens=tokens,
        num_layers=spec.num_layers,
        steps=steps,
        device_bytes=dtype.itemsize * (copies * units[largest] + working),
        disk_bytes=dtype.itemsize * 2 * num_runs * steps * (spec.num_layers + 1) * tokens * spec.hidden,
        record_bytes=num_sketches * _count_record(parameters.values())
        + steps * tokens * _count_routing(spec),
        reference=recipe.reference,
        operations=operations,
        rate=rate,
        seconds=products + elements,
    )


def _list_sizes(parameters: Mapping[str, Tensor]) -> dict[int, list[int]]:
    """Return the numbers of elements of the parameters of each layer, and of both ends under `ENDS`."""
    found: dict[int, list[int]] = {}
    for name, parameter in parameters.items():
        parts = name.split(".")
        number = int(parts[1]) if parts[0] == "layers" else ENDS
        found.setdefault(number, []).append(parameter.numel())
    return found


def _count_record(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that are stored of one tensor for each parameter, such as all gradients of a step."""
    total = 0
    for each in parameters:
        blocks = WIDTH * BlockGrid.of(tuple(each.shape)).num_blocks
        total += _HEADER + _BYTES * (blocks if each.numel() > MOST_WHOLE else each.numel())
    return total


def _count_routing(spec: ReferenceModel) -> int:
    """Return the bytes that are stored of a token in a step: its loss, and its experts in each layer."""
    if spec.moe is None:
        return _BYTES
    return _BYTES * (1 + (spec.num_layers - spec.num_dense_layers) * (spec.moe.top_k + 1))


def _count_layer(recipe: Recipe, spec: ReferenceModel) -> int:
    """Return the elements that a layer keeps for the backward pass of one row of the batch."""
    length, heads = recipe.data.seq_len, spec.num_heads
    attention = 4 * heads * spec.head_dim + 2 * spec.num_kv_heads * spec.head_dim
    wide = spec.ffn_hidden
    if spec.moe is not None:
        wide = max(wide, spec.moe.top_k * spec.moe.expert_hidden + spec.moe.shared_hidden)
    scores = 3 * min(MOST_SCORES, heads * length * length)
    return length * (10 * spec.hidden + attention + 4 * wide) + scores


def _count_ends(recipe: Recipe, spec: ReferenceModel) -> int:
    """Return the elements that the head keeps for the backward pass of one row: logits and their gradients."""
    return recipe.data.seq_len * (3 * spec.vocab_size + 4 * spec.hidden)


def _measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a product of matrices."""
    values = torch.ones((_SIZE, _SIZE), dtype=dtype, device=device)
    return 2 * _SIZE**3 / _time(lambda: values @ values, device)


def _measure_rates(
    spec: ReferenceModel, device: torch.device, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Return operations a second, and the seconds of an element for its initialization and its sketch."""
    values = torch.empty((_SIZE, _SIZE), dtype=dtype, device=device)
    region = Region.whole(values.shape)
    filling = _time(lambda: fill(values, spec, 0, "layers.0.attention.q_proj.weight"), device)
    sketching = _time(lambda: sketch(values, region), device)
    return _measure_products(device, dtype), filling / _SIZE**2, sketching / _SIZE**2


def _time(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic()

    work()
    began, count = wait(), 0
    while wait() - began < _SECONDS:
        work()
        count += 1
    return (wait() - began) / count
