"""A CUDA graph of a micro-batch's forward and backward pass, replayed for every micro-batch.

A graph replays kernels on the memory that they were captured with, so all inputs and outputs keep their
addresses. A batch is copied into the tensors of the first batch. Gathered parameters are copied into fixed
tensors once per step. Gradients accumulate in place. The hooks of FSDP2 are replaced: the passes are
preceded by one gather per step and followed by one reduction (`moeverify.parallel.fsdp2_gather`).
Parameters that a rank holds whole, such as experts over `ep`, are read in place.

Hooks do not run during a replay, so the results of a micro-batch are copied out after each launch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from moeverify.model.router import RouterRecord
from moeverify.parallel.fsdp2_gather import gather
from moeverify.parallel.regions.placement import local_part
from moeverify.seams import seam
from moeverify.train.data import MicroBatch
from moeverify.train.forward import compute_losses
from moeverify.train.objective import Losses, Normalizers
from moeverify.train.program import MicroBatchResult, StepInputs, TrainingProgram
from moeverify.train.routing import replay

_WARMUP_PASSES = 2  # torch compiles, selects kernels and opens connections during these
_INPUTS = ("tokens", "targets", "positions", "valid", "row_valid")


class MicroBatchGraphs:
    """A runner of the micro-batches of a program's steps by a graph, captured from the first ones.

    All micro-batches must have equal shapes. One graph holds the `joined` micro-batches that share a
    reduction.
    """

    def __init__(self, joined: int = 1) -> None:
        self._joined = joined
        self._weights: FixedWeights | None = None
        self._graphs: dict[bool, _Graph] = {}  # by whether the routing is replayed

    def run(self, inputs: StepInputs) -> Iterator[MicroBatchResult]:
        """Run each micro-batch of a step forward and backward, and yield it while routers hold its records.

        Collective: all ranks of the layout.
        """
        program, is_given = inputs.program, inputs.ids is not None
        stored = dict(program.model.named_parameters())
        with program.accumulate(True):
            sign = gather(program.model, program.device)
        gathered = dict(program.model.named_parameters())
        if self._weights is None:
            self._weights = FixedWeights(stored, gathered)
        weights = self._weights
        weights.refresh(gathered)
        if is_given not in self._graphs:
            self._graphs[is_given] = _Graph(inputs, inputs.batches[: self._joined], weights)
        weights.zero_gradients()
        for start in range(0, len(inputs.batches), self._joined):
            yield from self._graphs[is_given].launch(inputs, inputs.batches[start : start + self._joined])
        weights.hand_over(gathered)
        if sign is not None:
            with program.accumulate(True):
                torch.autograd.backward(sign)


class FixedWeights:
    """Plain tensors at fixed addresses that all passes use as parameters and as gradient accumulators.

    Parameters that FSDP2 gathers in each step are copied; the others share their memory.
    """

    def __init__(self, stored: Mapping[str, Tensor], gathered: Mapping[str, Tensor]) -> None:
        self._copied = [name for name in gathered if gathered[name] is not stored[name]]
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in gathered.items():
            local = local_part(parameter).detach()
            fixed = nn.Parameter(local.clone() if name in self._copied else local, parameter.requires_grad)
            # Before the capture, so that a backward pass adds to it instead of allocating a gradient.
            fixed.grad = torch.zeros_like(fixed)
            self.parameters[name] = fixed

    @torch.no_grad()
    def refresh(self, gathered: Mapping[str, Tensor]) -> None:
        """Copy the parameters that were gathered for this step."""
        if self._copied:
            torch._foreach_copy_(
                [self.parameters[name] for name in self._copied],
                [local_part(gathered[name]) for name in self._copied],
            )

    def zero_gradients(self) -> None:
        """Zero the gradients of the previous step and of the warmup passes."""
        torch._foreach_zero_(self._gradients())

    @seam
    def hand_over(self, gathered: Mapping[str, Tensor]) -> None:
        """Assign each parameter of the model its gradient, summed over the micro-batches."""
        for (name, parameter), gradient in zip(gathered.items(), self._gradients(), strict=True):
            assert name in self.parameters
            parameter.grad = _place_as(parameter, gradient)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]


def _place_as(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local gradient with the placements of its parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@dataclass
class _Shown:
    """Results of a pass in graph memory, which the next launch overwrites."""

    losses: Losses
    token_loss: Tensor | None
    records: Sequence[RouterRecord]


class _GraphTensors:
    """The input and output tensors of one micro-batch in a graph."""

    def __init__(self, inputs: StepInputs, batch: MicroBatch) -> None:
        self._batch = replace(batch, **{name: getattr(batch, name).clone() for name in _INPUTS})
        self._routers = inputs.program.routers
        self._ids: list[Tensor | None] = [None] * len(self._routers)
        if inputs.ids is not None:
            self._give_routing(inputs, batch)
            self._ids = [None if ids is None else ids.clone() for ids in self._find_routing()]
        self._shown: _Shown | None = None

    def fill(self, inputs: StepInputs, batch: MicroBatch) -> None:
        """Copy a micro-batch and its replayed routing into the graph's inputs."""
        for name in _INPUTS:
            getattr(self._batch, name).copy_(getattr(batch, name))
        if inputs.ids is not None:
            self._give_routing(inputs, batch)
            for fixed, ids in zip(self._ids, self._find_routing(), strict=True):
                assert fixed is not None
                assert ids is not None
                fixed.copy_(ids)

    def run(self, inputs: StepInputs, run: TrainingProgram, normalizers: Normalizers) -> None:
        """Run the passes on the graph's inputs."""
        for router, ids in zip(self._routers, self._ids, strict=True):
            router.module.replay = ids
        self._shown = run_passes(inputs, run, self._batch, normalizers)

    def show(self, batch: MicroBatch) -> MicroBatchResult:
        """Return copies of the last launch's results; routers then hold the records of the micro-batch."""
        shown = self._shown
        assert shown is not None
        for router, record in zip(self._routers, shown.records, strict=True):
            router.module.record = RouterRecord(*(value.clone() for value in record))
        losses = shown.losses
        copied = Losses(losses.lm.clone(), losses.balance.clone(), losses.z.clone())
        return MicroBatchResult(batch, copied, None if shown.token_loss is None else shown.token_loss.clone())

    def _give_routing(self, inputs: StepInputs, batch: MicroBatch) -> None:
        assert inputs.ids is not None
        replay(inputs.recipe, self._routers, batch, inputs.ids, inputs.step, inputs.program.device)

    def _find_routing(self) -> list[Tensor | None]:
        return [router.module.replay for router in self._routers]


class _Graph:
    """The passes of one or several micro-batches, captured on copies of their inputs."""

    def __init__(self, inputs: StepInputs, batches: Sequence[MicroBatch], weights: FixedWeights) -> None:
        program = inputs.program
        self._normalizers = replace(inputs.normalizers, num_valid=inputs.normalizers.num_valid.clone())
        self._slots = [_GraphTensors(inputs, batch) for batch in batches]
        run = replace(program, model=_Model(program.model, weights.parameters))

        def passes() -> None:
            for slot in self._slots:
                # FSDP2 is not part of these passes; the context serves wrappers that join gradients.
                with program.accumulate(slot is self._slots[-1]):
                    slot.run(inputs, run, self._normalizers)

        self._launch = capture(passes, program.device)

    def launch(self, inputs: StepInputs, batches: Sequence[MicroBatch]) -> Iterator[MicroBatchResult]:
        """Run the passes of micro-batches, and yield each result while routers hold its records."""
        for slot, batch in zip(self._slots, batches, strict=True):
            slot.fill(inputs, batch)
        self._normalizers.num_valid.copy_(inputs.normalizers.num_valid)
        self._launch()
        for slot, batch in zip(self._slots, batches, strict=True):
            yield slot.show(batch)


def run_passes(
    inputs: StepInputs, run: TrainingProgram, batch: MicroBatch, normalizers: Normalizers
) -> _Shown:
    """Run one micro-batch forward and backward without FSDP2's hooks, and return its results."""
    with _without_hooks(inputs.program.model):
        losses, token_loss = compute_losses(inputs.recipe, run, batch, normalizers)
        inputs.program.engine.backward(losses.total * run.scale)
    records = [router.module.record for router in run.routers]
    return _Shown(losses.detach(), token_loss, [record for record in records if record is not None])


class _Model(nn.Module):
    """A model that computes with other tensors than its own parameters."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._called = (model, dict(parameters))  # in a tuple, so that the model does not become a submodule

    def forward(self, *inputs: Any) -> Any:
        """Return the output of the model with the replaced parameters."""
        model, parameters = self._called
        return functional_call(model, parameters, inputs)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Disable the forward hooks of FSDP2, which would gather parameters and reduce gradients."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    kept = [(module, kind, getattr(module, kind)) for module in model.modules() for kind in kinds]
    for module, kind, _ in kept:
        setattr(module, kind, OrderedDict())
    try:
        yield
    finally:
        for module, kind, hooks in kept:
            setattr(module, kind, hooks)


@seam
def capture(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that replays all kernels of `function` on the tensors of its last call.

    `function` first runs `_WARMUP_PASSES` times and modifies its accumulators. During capture it launches
    nothing. Collective: the ranks of the collectives in `function`.
    """
    # torch asks for passes on a side stream before a capture
    # (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP_PASSES):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # "relaxed": other threads, such as one that compares, may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        function()
    return graph.replay
