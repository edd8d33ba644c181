"""Probes of the capabilities of torch and optional packages on a device."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from moeverify.model.megablocks.package import STAND_INS, import_package
from moeverify.model.megablocks.requirements import NEEDED
from moeverify.results.probe import Answer, ProbeOutcome
from moeverify.verification.launch.runner import RankContext


def probe_divide_factor(context: RankContext) -> Answer:
    """Let FSDP2 divide gradients by 2 on a mesh with one rank."""
    ratios = {
        str(dtype).removeprefix("torch."): _divided(context, dtype)
        for dtype in (torch.float64, torch.float32)
    }
    if all(ratio == 0.5 for ratio in ratios.values()):
        return Answer(outcome=ProbeOutcome.RIGHT)
    wrong = tuple(f"{name} by {1 / ratio:g}" for name, ratio in ratios.items())
    return Answer(outcome=ProbeOutcome.WRONG, wrong=wrong)


def _divided(context: RankContext, dtype: torch.dtype) -> float:
    """Return the remaining fraction of the gradient."""
    model = nn.Linear(2, 1, bias=False, dtype=dtype, device=context.device)
    sharded = fully_shard(model, mesh=init_device_mesh(context.device.type, (1,)))
    assert isinstance(sharded, FSDPModule)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(2.0)
    model(torch.ones(1, 2, dtype=dtype, device=context.device)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    return float(gradient.to_local()[0, 0])  # type: ignore[attr-defined]


def probe_grouped_mm(context: RankContext) -> Answer:
    """Multiply two groups of rows in every dtype, and compare with a loop."""
    grouped = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
    if grouped is None:
        return Answer(outcome=ProbeOutcome.ABSENT)
    right: list[str] = []
    wrong: list[str] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        rows = torch.randn(8, 16, device=context.device).to(dtype)
        weight = torch.randn(2, 16, 16, device=context.device).to(dtype)
        ends = torch.tensor([3, 8], dtype=torch.int32, device=context.device)
        try:
            actual: Tensor = grouped(rows, weight, offs=ends)
        except RuntimeError:
            continue
        expected = torch.cat([rows[:3] @ weight[0], rows[3:] @ weight[1]])
        close = torch.allclose(actual.float(), expected.float(), rtol=2e-2, atol=2e-2)
        (right if close else wrong).append(name)
    if wrong:
        return Answer(outcome=ProbeOutcome.WRONG, wrong=tuple(wrong))
    return Answer(outcome=ProbeOutcome.RIGHT if right else ProbeOutcome.REFUSED, found=tuple(right))


def probe_fused_sgd(context: RankContext) -> Answer:
    """Take a step of fused SGD on a sharded parameter."""
    mesh = init_device_mesh(context.device.type, (1,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, device=context.device), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4, device=context.device), mesh, [Shard(0)])
    try:
        torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    except (RuntimeError, NotImplementedError):
        return Answer(outcome=ProbeOutcome.REFUSED)
    right = torch.equal(parameter.detach().to_local(), torch.full((4,), 0.5, device=context.device))  # type: ignore[attr-defined]
    return Answer(outcome=ProbeOutcome.RIGHT if right else ProbeOutcome.WRONG)


def probe_triton(context: RankContext) -> Answer:
    """Import triton."""
    if importlib.util.find_spec("triton") is None:
        return Answer(outcome=ProbeOutcome.ABSENT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("triton")
    except Exception as error:
        return Answer(outcome=ProbeOutcome.BROKEN, error=_first_line(error))
    return Answer(outcome=ProbeOutcome.RIGHT, found=(_version("triton"),))


def probe_megablocks(context: RankContext) -> Answer:
    """Import megablocks as `experts: megablocks` does, with stand-ins for packages that are not compiled."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        return Answer(outcome=ProbeOutcome.ABSENT)
    compiled = [name for name in STAND_INS if importlib.util.find_spec(name) is not None]
    replaced = [name for name in STAND_INS if name not in compiled]
    try:
        import_package(torch.float32)
    except Exception as error:
        return Answer(outcome=ProbeOutcome.BROKEN, error=_first_line(error))
    parts = [f"compiled {' and '.join(compiled)}"] if compiled else []
    parts += [f"stand-ins for {' and '.join(replaced)}"] if replaced else []
    return Answer(outcome=ProbeOutcome.RIGHT, found=(_version("megablocks"), *parts))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def probe_gpu(context: RankContext) -> Answer:
    """Return the name and memory of the first rank's GPU."""
    found = torch.cuda.get_device_properties(context.device)
    kind = (
        f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
    )
    return Answer(outcome=ProbeOutcome.SLOW if found.major < 9 else ProbeOutcome.RIGHT, found=(kind,))


def probe_peers(context: RankContext) -> Answer:
    """Return whether the first two GPUs can access each other's memory."""
    can_access = torch.cuda.can_device_access_peer(0, 1)
    return Answer(outcome=ProbeOutcome.RIGHT if can_access else ProbeOutcome.ABSENT)


def probe_nccl(context: RankContext) -> Answer:
    """Return the version of NCCL."""
    if not dist.is_nccl_available():
        return Answer(outcome=ProbeOutcome.ABSENT)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Answer(outcome=ProbeOutcome.RIGHT, found=(version,))
