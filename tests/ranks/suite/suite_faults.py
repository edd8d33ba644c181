"""Faults on a rank, for `--fault suite_faults:NAME`: called on every rank before the layout is built."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moeverify.explain import explain, record
from moeverify.explain.fitting import diagnosis
from moeverify.faults.patch import Original, Patch
from moeverify.model import rope
from moeverify.model.transformer import Transformer
from moeverify.parallel.gradients import finalize_gradients
from moeverify.train.assemble import assemble_parallel
from moeverify.train.optimizer import build_optimizer
from moeverify.verification.worker import investigate, verify


def act() -> None:
    """On rank 1 perform the action in the next line of a file; rank 0 continues into the first collective."""
    if dist.get_rank() != 1:
        return
    path = Path(os.environ["MOEVERIFY_TEST_ACTS"])
    act, *rest = path.read_text().splitlines()
    path.write_text("\n".join(rest))
    if act == "raise":
        raise ZeroDivisionError("planted on rank 1")
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "hang":
        time.sleep(600)


def stray_from_step_0(patch: Patch) -> None:
    """Make every update depend on the time, far inside the bound."""
    _stray(patch, 0)


def stray_from_step_1(patch: Patch) -> None:
    """The same, except for the first update of a run."""
    _stray(patch, 1)


def count_models(patch: Patch) -> None:
    """Fail if the model of an earlier run still exists when another one is made."""

    @patch.wrap(assemble_parallel)
    def assemble(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        if any(isinstance(thing, Transformer) for thing in gc.get_objects()):
            raise RuntimeError("the model of the run before is still there")
        return original(*arguments, **named)


def _stray(patch: Patch, first: int) -> None:
    @patch.wrap(build_optimizer)
    def build(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        optimizer, calls = original(*arguments, **named), itertools.count()

        def add(*_: Any) -> None:
            if next(calls) >= first:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.data.mul_(1.0 + next(_STRAYS) * 2.0**-52)

        optimizer.register_step_post_hook(add)
        return optimizer


_STRAYS = itertools.count(1)


def fail_to_diagnose(patch: Patch) -> None:
    """Train wrongly, and let the search for causes raise on rank 0."""
    _change_weights(patch)

    def explain_tensors(*_: Any) -> Any:
        raise ZeroDivisionError("planted in the diagnosis")

    diagnosis.explain_tensors = explain_tensors


def die_in_diagnosis(patch: Patch) -> None:
    """Train wrongly, and lose rank 1 in the second run that a diagnosis needs."""
    _change_weights(patch)
    if dist.get_rank() == 1:

        def run_again(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        investigate._rerun = run_again  # type: ignore[assignment]


def raise_in_recorder(patch: Patch) -> None:
    """Train wrongly, and let the recorder raise on rank 1."""
    _double_gradients(patch)

    def note(*_: Any) -> Any:
        raise ZeroDivisionError("planted in the recorder")

    if dist.get_rank() == 1:
        record.Recorder._note = note  # type: ignore[assignment,method-assign]


def die_in_recorder(patch: Patch) -> None:
    """Train wrongly, and lose rank 1 during a step of the recorded run."""
    _double_gradients(patch)

    def enter_step(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        record.Recorder._enter_step = enter_step  # type: ignore[assignment,method-assign]


def die_in_search(patch: Patch) -> None:
    """Train wrongly, and lose rank 0 when the first change is tried."""
    _double_gradients(patch)

    def search(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    explain.Explainer._search = search  # type: ignore[assignment,method-assign]
    verify.choose_share = lambda *_: 1.0


def _double_gradients(patch: Patch) -> None:
    """Double every gradient, which hypotheses can name."""

    @patch.wrap(finalize_gradients)
    def finalize(original: Original[Any], parameters: Any, reductions: Any) -> None:
        original(parameters, reductions)
        for parameter in parameters:
            parameter.grad.mul_(2.0)


def _change_weights(patch: Patch) -> None:
    """Increase every update by a hundredth of the weight."""

    @patch.wrap(build_optimizer)
    def build(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        optimizer = original(*arguments, **named)

        def change(*_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(1.01)

        optimizer.register_step_post_hook(change)
        return optimizer


def reduce_other_shapes() -> None:
    """Reduce equally many numbers on both ranks, in different shapes."""
    dist.all_reduce(torch.zeros(2, 8) if dist.get_rank() == 0 else torch.zeros(16))


def reduce_other_types() -> None:
    """Reduce equally many bytes on both ranks, as different dtypes."""
    dist.all_reduce(torch.zeros(4, dtype=torch.float64 if dist.get_rank() == 0 else torch.int64))


def reduce_late(patch: Patch) -> None:
    """Reduce different shapes on the ranks of the first tp group, after the second step of the optimizer."""

    @patch.wrap(build_optimizer)
    def build(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        optimizer, calls = original(*arguments, **named), itertools.count()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        meshes = (parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
        mesh = next(mesh for mesh in meshes if "tp" in (mesh.mesh_dim_names or ()))

        def reduce(*_: Any) -> None:
            if next(calls) == 1:
                shape = (2, 8) if dist.get_rank() == 0 else (16,)
                dist.all_reduce(torch.zeros(shape), group=mesh["tp"].get_group())

        optimizer.register_step_post_hook(reduce)
        return optimizer


def round_frequencies(patch: Patch) -> None:
    """Round the rotary frequencies to bfloat16, which moves outputs by less than computing in bfloat16."""

    @patch.replace(rope.compute_rotation)
    def compute(positions: Tensor, head_dim: int, theta: float, yarn: Any = None) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        frequencies = (theta**-exponents).to(torch.bfloat16).to(torch.float64)
        angles = (positions.to(torch.float64).unsqueeze(-1) * frequencies).unsqueeze(-2)
        return angles.cos(), angles.sin()


def swap() -> None:
    """Issue different collectives on the ranks, and hang there."""
    tensor = torch.zeros(4, dtype=torch.float64)
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
        time.sleep(600)
    dist.broadcast(tensor, 0)
    time.sleep(600)


def change_second_block(patch: Patch) -> None:
    """Let the second block return hidden states that are too large by one part in a million."""

    @patch.wrap(assemble_parallel)
    def assemble(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        program = original(*arguments, **named)
        for name, module in program.model.named_modules():
            if name.endswith("layers.1"):
                module.register_forward_hook(lambda _, __, output: (output[0] * 1.000001, *output[1:]))
        return program


class _Larger(torch.autograd.Function):
    """Identity with a gradient that is too large by one part in a million."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.000001


def change_gradient_of_second_block(patch: Patch) -> None:
    """Let the second block return an input gradient that is too large by one part in a million."""

    @patch.wrap(assemble_parallel)
    def assemble(original: Original[Any], *arguments: Any, **named: Any) -> Any:
        program = original(*arguments, **named)
        for name, module in program.model.named_modules():
            if name.endswith("layers.1"):
                module.register_forward_pre_hook(
                    lambda _, inputs: (_Larger.apply(inputs[0]), *inputs[1:])  # type: ignore[no-untyped-call]
                )
        return program
