"""Roofline of a step: the rates that this machine reaches with one large operation at a time.

Functions marked "Collective: all ranks" must be called by all ranks of the default process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.cases.schema import Case
from moeverify.model.expert_backends import EXPERTS
from moeverify.model.expert_weights import ExpertWeights
from moeverify.parallel.collectives import GATHER, REDUCE_SCATTER
from moeverify.results.measurement import Roofline
from moeverify.tools.bench.profile import bus_factor
from moeverify.train.program import compute_dtype_of

_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
_NUM_LAUNCHES = 200
_COLLECTIVE_BYTES = {"cuda": 2**28, "cpu": 2**22}
_REPEATS = 10


def measure_roofline(case: Case, device: torch.device) -> Roofline:
    """Return the rates of this rank and its links. Collective: all ranks."""
    dtype = compute_dtype_of(case.recipe.precision)
    dist.barrier()
    matmul = measure_matmul(dtype, device)
    experts = measure_experts(case, dtype, device)
    collectives = measure_collectives(device) if dist.get_world_size() > 1 else {}
    return Roofline(
        matmul=matmul,
        experts=experts,
        copying=measure_copying(device),
        launch=measure_launch(device),
        collectives=collectives,
    )


def measure_matmul(dtype: torch.dtype, device: torch.device) -> float:
    """Return the rate of one large square matrix product, in operations per second."""
    size = _MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / time_repeated(lambda: torch.mm(a, b, out=out), device)


def measure_copying(device: torch.device) -> float:
    """Return the rate at which one large copy reads and writes, in bytes per second."""
    source = torch.zeros(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_repeated(lambda: target.copy_(source), device)


def measure_launch(device: torch.device) -> float:
    """Return the minimum host time in seconds to dispatch one small operation, without waiting for it."""
    number = torch.zeros(8, device=device)
    seconds = []
    for _ in range(_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(_NUM_LAUNCHES):
            number.add_(1.0)
        seconds.append((time.perf_counter() - began) / _NUM_LAUNCHES)
    return min(seconds)


def measure_experts(case: Case, dtype: torch.dtype, device: torch.device) -> float | None:
    """Return the rate of this rank's experts of one layer, forward and backward, in operations per second.

    Every expert gets the same number of tokens. Return None without experts, or if the backend does not
    expose its product.
    """
    model, layout = case.recipe.model.reference, case.layout
    backend = EXPERTS.find(layout.experts).multiply
    if model is None or model.moe is None or backend is None:
        return None
    moe, hidden = model.moe, model.hidden
    tokens = case.recipe.data.batch * case.recipe.data.seq_len // layout.world_size // layout.micro_batches
    num_experts, width = moe.num_experts // layout.ep, moe.expert_hidden // layout.expert_tp
    rows = max(tokens * layout.tp * moe.top_k // num_experts, 1) * num_experts

    def make(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) * 0.02).to(dtype).requires_grad_()

    weights = ExpertWeights(
        make(num_experts, width, hidden), make(num_experts, width, hidden), make(num_experts, hidden, width)
    )
    x, slope = make(rows, hidden), torch.randn(rows, hidden, device=device).to(dtype)
    counts = torch.full((num_experts,), rows // num_experts, device=device)

    def run() -> None:
        torch.autograd.grad(backend(x, counts, weights), [x, *weights[:3]], slope)

    return 18 * rows * hidden * width / time_repeated(run, device)


def measure_collectives(device: torch.device) -> dict[str, float]:
    """Return the bus bandwidth of each kind of collective over all ranks. Collective: all ranks."""
    num_ranks = dist.get_world_size()
    whole = torch.zeros(_COLLECTIVE_BYTES[device.type] // 4 // num_ranks * num_ranks, device=device)
    other, part = torch.empty_like(whole), torch.empty(len(whole) // num_ranks, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: GATHER(whole, part),
        "reduce_scatter": lambda: REDUCE_SCATTER(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
    }
    found = {}
    for kind, call in calls.items():
        dist.barrier()
        found[kind] = whole.nbytes * bus_factor(kind, num_ranks) / time_repeated(call, device)
    return found


def time_repeated(call: Callable[[], object], device: torch.device) -> float:
    """Return the median duration of a call in seconds, after two warmup calls."""
    for _ in range(2):
        call()
    seconds = []
    for _ in range(_REPEATS):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
