"""The forward and backward pass of a micro-batch as one CUDA graph, launched again for every micro-batch.

A graph repeats kernels on the memory that they were captured with, so everything that a pass reads and writes stays
where it is: a batch is copied into the tensors of the first one, gathered parameters are copied into others once a
step, and gradients are added up in place. What FSDP2 does by hooks, it does around the passes: it gathers before the
first one of a step and reduces after the last one (`moeverify.parallel.fsdp2_gather`). Parameters that a rank keeps
whole, such as experts over `ep`, are read where they are.

Nothing that a graph computes can be seen by hooks; what a micro-batch shows is copied out after each launch.
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

from moeverify.layout.placement import local_part
from moeverify.model.router import RouterRecord
from moeverify.parallel.fsdp2_gather import gather
from moeverify.seams import seam
from moeverify.train.data import Batch
from moeverify.train.forward import compute_losses
from moeverify.train.objective import Losses, Normalizers
from moeverify.train.program import MicroBatchResult, Program, StepInputs
from moeverify.train.routing import replay

_WARMUP_PASSES = 2  # in which torch compiles, chooses kernels, and opens connections
_INPUTS = ("tokens", "targets", "positions", "valid", "row_valid")


class MicroBatchGraphs:
    """Runs the micro-batches of one program's steps, all of equal shapes, by a graph that the first ones capture.

    Those whose gradients are `joined` are in one graph.
    """

    def __init__(self, joined: int = 1) -> None:
        self._joined = joined
        self._weights: FixedWeights | None = None
        self._graphs: dict[bool, _Graph] = {}  # with and without a routing that is given

    def run(self, inputs: StepInputs) -> Iterator[MicroBatchResult]:
        """Run each micro-batch of a step forward and backward, and yield it while the routers hold its records.

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
    """What all passes compute with, and where they add up gradients: plain tensors that stay where they are.

    A parameter that FSDP2 gathers anew in each step is copied, any other one shares its memory.
    """

    def __init__(self, stored: Mapping[str, Tensor], gathered: Mapping[str, Tensor]) -> None:
        self._copied = [name for name in gathered if gathered[name] is not stored[name]]
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in gathered.items():
            local = local_part(parameter).detach()
            fixed = nn.Parameter(local.clone() if name in self._copied else local, parameter.requires_grad)
            fixed.grad = torch.zeros_like(fixed)
            self.parameters[name] = fixed

    @torch.no_grad()
    def refresh(self, gathered: Mapping[str, Tensor]) -> None:
        """Take over what was gathered for this step."""
        if self._copied:
            torch._foreach_copy_(
                [self.parameters[name] for name in self._copied],
                [local_part(gathered[name]) for name in self._copied],
            )

    def zero_gradients(self) -> None:
        """Forget the gradients of the step before, and of what a capture has run."""
        torch._foreach_zero_(self._gradients())

    @seam
    def hand_over(self, gathered: Mapping[str, Tensor]) -> None:
        """Give each parameter of the model its gradient, summed over the micro-batches."""
        for (name, parameter), gradient in zip(gathered.items(), self._gradients(), strict=True):
            assert name in self.parameters
            parameter.grad = _place_as(parameter, gradient)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]


def _place_as(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local tensor as what the gradient of a parameter is."""
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
    """What a pass leaves, in memory of the graph: the next launch writes over it."""

    losses: Losses
    token_loss: Tensor | None
    records: Sequence[RouterRecord]


class _Slot:
    """The place of a micro-batch in a graph: what it reads, and what it shows."""

    def __init__(self, inputs: StepInputs, batch: Batch) -> None:
        self._batch = replace(batch, **{name: getattr(batch, name).clone() for name in _INPUTS})
        self._routers = inputs.program.routers
        self._ids: list[Tensor | None] = [None] * len(self._routers)
        if inputs.ids is not None:
            self._give_routing(inputs, batch)
            self._ids = [None if ids is None else ids.clone() for ids in self._find_routing()]
        self._shown: _Shown | None = None

    def fill(self, inputs: StepInputs, batch: Batch) -> None:
        """Take over a micro-batch."""
        for name in _INPUTS:
            getattr(self._batch, name).copy_(getattr(batch, name))
        if inputs.ids is not None:
            self._give_routing(inputs, batch)
            for fixed, ids in zip(self._ids, self._find_routing(), strict=True):
                assert fixed is not None
                assert ids is not None
                fixed.copy_(ids)

    def run(self, inputs: StepInputs, run: Program, normalizers: Normalizers) -> None:
        """Run the passes on what is here."""
        for router, ids in zip(self._routers, self._ids, strict=True):
            router.module.replay = ids
        self._shown = run_passes(inputs, run, self._batch, normalizers)

    def show(self, batch: Batch) -> MicroBatchResult:
        """Return what the last launch left of the micro-batch; the routers hold its records then."""
        shown = self._shown
        assert shown is not None
        for router, record in zip(self._routers, shown.records, strict=True):
            router.module.record = RouterRecord(*(value.clone() for value in record))
        losses = shown.losses
        copied = Losses(losses.lm.clone(), losses.balance.clone(), losses.z.clone())
        return MicroBatchResult(batch, copied, None if shown.token_loss is None else shown.token_loss.clone())

    def _give_routing(self, inputs: StepInputs, batch: Batch) -> None:
        assert inputs.ids is not None
        replay(inputs.recipe, self._routers, batch, inputs.ids, inputs.step, inputs.program.device)

    def _find_routing(self) -> list[Tensor | None]:
        return [router.module.replay for router in self._routers]


class _Graph:
    """The passes of some micro-batches, captured on copies of their inputs."""

    def __init__(self, inputs: StepInputs, batches: Sequence[Batch], weights: FixedWeights) -> None:
        program = inputs.program
        self._normalizers = replace(inputs.normalizers, num_valid=inputs.normalizers.num_valid.clone())
        self._slots = [_Slot(inputs, batch) for batch in batches]
        run = replace(program, model=_Model(program.model, weights.parameters))

        def passes() -> None:
            for slot in self._slots:
                # FSDP2 is not in these passes: this is for those that join gradients.
                with program.accumulate(slot is self._slots[-1]):
                    slot.run(inputs, run, self._normalizers)

        self._launch = capture(passes, program.device)

    def launch(self, inputs: StepInputs, batches: Sequence[Batch]) -> Iterator[MicroBatchResult]:
        """Run the passes of micro-batches, and yield each while the routers hold its records."""
        for slot, batch in zip(self._slots, batches, strict=True):
            slot.fill(inputs, batch)
        self._normalizers.num_valid.copy_(inputs.normalizers.num_valid)
        self._launch()
        for slot, batch in zip(self._slots, batches, strict=True):
            yield slot.show(batch)


def run_passes(inputs: StepInputs, run: Program, batch: Batch, normalizers: Normalizers) -> _Shown:
    """Run one micro-batch forward and backward without FSDP2, and return what it leaves."""
    with _without_hooks(inputs.program.model):
        losses, token_loss = compute_losses(inputs.recipe, run, batch, normalizers)
        inputs.program.engine.backward(losses.total * run.scale)
    records = [router.module.record for router in run.routers]
    return _Shown(losses.detach(), token_loss, [record for record in records if record is not None])


class _Model(nn.Module):
    """A model that computes with other tensors than its parameters."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._called = (model, dict(parameters))  # as a pair, so that the model does not become a submodule

    def forward(self, *inputs: Any) -> Any:
        """Return what the model does."""
        model, parameters = self._called
        return functional_call(model, parameters, inputs)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Keep FSDP2 from gathering and reducing in passes whose parameters and gradients stay where they are."""
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
    """Return what launches all kernels of a function again, on the tensors of its last call here.

    The function runs a few times before, and so adds to what it adds to; captured, it runs on no device. Collective:
    the ranks that its collectives reach.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP_PASSES):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # What else asks CUDA for something meanwhile, such as a thread that compares, has no part in the graph.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        function()
    return graph.replay
