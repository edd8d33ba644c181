"""Debugger stop inside the module that the cause of a finding names. Runs on every rank."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.schema import Case
from moeverify.explain.fitting.first_divergence import READING_BOUNDS
from moeverify.explain.fitting.rank_readings import locate_tokens
from moeverify.explain.fitting.wrong_tensor import MODULE_KINDS
from moeverify.parallel.pipeline import ModelStage
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import Passes
from moeverify.parallel.regions.placement import is_partial, local_part
from moeverify.parallel.regions.region import Region
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading, Tap, list_floats
from moeverify.train.program import TrainingProgram, dtype_of
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.jobs import BlamedPlace, StopPoint
from moeverify.verification.launch.single_rank_world import single_rank_world
from moeverify.verification.worker.step_tap import read_golden_modules

Stop = Callable[[str, FrameType | None, Mapping[str, object]], None]
"""Function that stops the rank: (reason, frame or None for the module's caller, names at the prompt)."""


@dataclass(frozen=True)
class ModuleValue:
    """A tensor at one end of a module: this rank's local value and the single-device value.

    Shapes: `expected` (rows, positions, ...) of the global batch, float64. `actual` is the `region` of it
    that this rank holds. `bound` is the allowed relative error.
    """

    direction: str
    module: str
    expected: Tensor
    actual: Tensor
    region: Region
    bound: float

    @property
    def kind(self) -> str:
        """Return "module output" or "module gradient"."""
        return MODULE_KINDS[self.direction]


def read_expected(
    case: Case, golden: StoredGolden, at: StopPoint, device: torch.device
) -> tuple[Reading, ...]:
    """Return on every rank the single-device readings at the point where the blamed module first differs.

    Empty if no module is blamed, and in bfloat16, where rounding hides the first difference. Rank 0 trains
    the single-device model up to that step. Collective: all ranks of the default process group.
    """
    place = at.place
    if place is None or not place.reading or dtype_of(case.recipe.precision) not in READING_BOUNDS:
        return ()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        with single_rank_world(device):
            readings = read_golden_modules(case.recipe, golden, at.step, device)
        found[0] = tuple(each for each in readings if is_at(place, each))
    dist.broadcast_object_list(found)
    return tuple(found[0])


def is_at(place: BlamedPlace, reading: Reading) -> bool:
    """Return whether a reading belongs to the blamed place: same direction, module and end."""
    return (reading.direction, reading.module, reading.end) == (place.direction, place.reading, place.end)


class BlamedStop:
    """Stops this rank once, in one step, at the place that a cause names.

    Before the stop, `show` gets the module's value so that the debugger can compare it.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        program: TrainingProgram,
        place: BlamedPlace,
        expected: Sequence[Reading],
        stop: Stop,
        show: Callable[[ModuleValue], None],
    ) -> None:
        self._program = program
        self._place = place
        self._expected = expected
        self._stop_rank = stop
        self._show = show
        self._tp = (MeshPlan.of(case.layout).coordinates(rank).get("tp", 0), case.layout.tp)
        self._bound = READING_BOUNDS.get(
            dtype_of(case.recipe.precision), 0.0
        )  # without a bound, `expected` is empty
        self._num_rows = case.recipe.data.batch
        self._shares = program.share.micro_batches(program.num_micro_batches)
        self._passes = Passes()
        self._root: nn.Module | None = None  # the module's stage
        self.has_stopped = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Install the hooks that stop this rank, for the duration of the block."""
        place = self._place
        with ExitStack() as stack:
            if place.direction == FORWARD and not place.inner:
                stack.enter_context(self._watch_returns())
            else:
                stack.enter_context(self._watch_readings())
            yield

    def _stop(self, frame: FrameType | None, value: ModuleValue | None, **others: object) -> None:
        self.has_stopped = True
        if value is not None:
            self._show(value)
            expected = value.region.take(value.expected)
            others |= {"expected": expected, "actual": value.actual, "region": value.region}
        self._stop_rank(self._place.about, frame, others)

    # Stop at a reading inside a module, or at a gradient.

    @contextmanager
    def _watch_readings(self) -> Iterator[None]:
        share = self._shares[0]
        tap = Tap(
            self._program.model,
            len(share.rows),
            len(self._program.share.positions),
            scale=self._program.scale,
            limit=1 << 62,
        )
        tap.on_reading = self._look_at_reading
        with tap.reading():
            yield

    def _look_at_reading(self, reading: Reading) -> None:
        is_due = reading.micro_batch == self._place.micro_batch and is_at(self._place, reading)
        if self.has_stopped or not is_due:
            return
        value = self._find_value(reading.local, reading.micro_batch, reading.slot)
        if value is not None:
            self._stop(None, value)

    # Stop at the return of a module's own function.

    @contextmanager
    def _watch_returns(self) -> Iterator[None]:
        """Stop in the frame of the module's function, at its `return` line."""
        found = _find_callable(self._program.model, self._place.module)
        if found is None:  # the module is on another pipeline stage
            yield
            return
        owner, called, root = found
        self._root = root
        handles = [
            root.register_forward_pre_hook(self._count_call, prepend=True),
            owner.register_forward_pre_hook(self._make_begin(called), prepend=False),
        ]
        try:
            yield
        finally:
            sys.setprofile(None)
            for handle in handles:
                handle.remove()

    def _count_call(self, module: nn.Module, inputs: Any) -> None:
        self._passes.begin(module)

    def _make_begin(self, called: Any) -> Callable[..., None]:
        code = _find_code(called)

        def on_event(frame: FrameType, event: str, result: Any) -> None:
            if event != "return" or frame.f_code is not code or _first_argument(frame) is not called:
                return
            sys.setprofile(None)
            if not self.has_stopped and result is not None:  # None: the function raised
                self._stop(frame, self._choose_value(result))

        def begin(module: nn.Module, inputs: Any) -> None:
            if not self.has_stopped and self._passes.number(self._root) == self._place.micro_batch:
                sys.setprofile(on_event)

        return begin

    def _choose_value(self, result: Any) -> ModuleValue | None:
        """Return the first tensor of an output that differs from the single device, or its first tensor."""
        number = self._passes.number(self._root) or 0
        values = [
            value
            for slot, tensor in list_floats(result)
            if not is_partial(tensor)
            and (value := self._find_value(local_part(tensor.detach()), number, slot)) is not None
        ]
        return next((each for each in values if _differs(each)), values[0] if values else None)

    def _find_value(self, local: Tensor, micro_batch: int, slot: str = "") -> ModuleValue | None:
        """Return a local tensor with its single-device value, or None if no reading has a matching shape."""
        share = self._shares[min(micro_batch, len(self._shares) - 1)]
        num_tokens = len(share.rows) * len(share.positions)
        if local.ndim == 2 and local.shape[0] == num_tokens:  # (tokens, n)
            local = local.view(len(share.rows), len(share.positions), -1)
        for reading in self._expected:
            expected = reading.local.to(torch.float64)
            if slot and reading.slot != slot:
                continue
            if reading.direction == BACKWARD and len(expected) < self._num_rows:
                continue  # a gradient that all rows share: this rank has only a partial sum of it
            region = locate_tokens(expected, local, share.rows, share.positions, self._tp)
            if region is not None:
                place = self._place
                return ModuleValue(place.direction, place.reading, expected, local, region, self._bound)
        return None


def _differs(value: ModuleValue) -> bool:
    expected = value.region.take(value.expected)
    error = float((value.actual.detach().cpu().to(torch.float64) - expected).norm())
    return not error <= value.bound * float(value.expected.norm())


def _find_callable(model: nn.Module, path: str) -> tuple[nn.Module, Any, nn.Module] | None:
    """Return (module, callable, pipeline stage) for a path, or None.

    The callable is the module itself, or an attribute that is not a module, such as the dispatcher of a MoE
    block.
    """
    root = model
    modules: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, module in model.named_modules():
        root = module if isinstance(module, ModelStage) else root
        modules[logical_name(name)] = (module, root)  # the innermost of nested wrappers comes last
    if path in modules:
        module, root = modules[path]
        return module, module, root
    around, _, attribute = path.rpartition(".")
    if around not in modules:
        return None
    module, root = modules[around]
    called = getattr(module, attribute, None)
    return None if called is None else (module, called, root)


def _find_code(called: Any) -> CodeType | None:
    kind = type(called)
    function = inspect.unwrap(kind.forward if isinstance(called, nn.Module) else kind.__call__)
    return getattr(function, "__code__", None)


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None
