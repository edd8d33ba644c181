"""The recorder of one process: it hears of forward passes, backward passes and optimizer calls, and writes lines."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from moeverify.capture.lines import Call, End, Header, Note, Options, Rows
from moeverify.capture.model import WatchedModel, compute_dtype, find_dropout, find_rows, hash_rows, is_number
from moeverify.capture.rank_file import RankFile
from moeverify.capture.settings import Settings
from moeverify.capture.tensors import keep_tensor
from moeverify.layout.observer import INITIAL
from moeverify.layout.placement import local_part
from moeverify.results.checks import Kind

P = ParamSpec("P")
_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_MOST_ROWS = 4096


def _safely(method: Callable[Concatenate[Recorder, P], None]) -> Callable[Concatenate[Recorder, P], None]:
    """Return a method that never raises into the script: what goes wrong ends the recording, with a line."""

    @functools.wraps(method)
    def call(self: Recorder, /, *values: P.args, **named: P.kwargs) -> None:
        if not self.is_active:
            return
        try:
            with torch.no_grad():
                method(self, *values, **named)
        except Exception as error:
            self.fail(error)

    return call


class Recorder:
    """Records the optimizer steps that the settings name.

    `on_stop` is called when the last one is over, `on_model` when a model is seen for the first time.
    """

    def __init__(self, settings: Settings, rank: int, world_size: int) -> None:
        self.settings = settings
        self.is_active = True
        self.on_stop: Callable[[], object] = lambda: None
        self.on_model: Callable[[], object] = lambda: None
        self.model = WatchedModel()
        self.step = 0
        self._launched = rank, world_size
        self._depth = threading.local()
        self._nested: set[str] = set()
        self._file: RankFile | None = None
        self._steps: dict[int, int] = {}  # by id of the optimizer
        self._before: dict[int, Tensor] = {}  # id of the parameter -> its value before the step
        self._norms: dict[
            int, float
        ] = {}  # id of the parameter -> norm of its gradient after the last backward
        self._has_initial: set[int] = set()
        self._pid = os.getpid()
        atexit.register(self.close)

    # What hooks call -----------------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Hear that a module's forward pass begins. The outermost one is the model."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth == 0:
            self._enter_model(module, sys._getframe(1), torch.is_grad_enabled() and module.training)
        elif self.step == self.settings.first:
            self._look_inside(inputs)

    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hear that a module's forward pass is over, also where it raised."""
        self._depth.value = getattr(self._depth, "value", 1) - 1

    @contextmanager
    def nested(self, label: str) -> Iterator[bool]:
        """Give whether no call of this name is around this one."""
        if label in self._nested:
            yield False
            return
        self._nested.add(label)
        try:
            yield True
        finally:
            self._nested.discard(label)

    @_safely
    def note_call(self, label: str) -> None:
        """Keep a call of the training loop."""
        self._add_call(label)

    @_safely
    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Keep the call with its loss, and the norms that the gradients have now."""
        losses = tuple(float(root) for root in roots if is_number(root)) if self._records() else ()
        self._add_call("backward", losses=losses)
        if self._records():
            self._norms = self._measure_gradients()

    @_safely
    def before_zero_grad(self) -> None:
        """Keep the call, and how large the gradients are that it throws away."""
        norms = self._measure_gradients().values() if self._records() else ()
        self._add_call("zero_grad", discarded=sum(norm**2 for norm in norms) ** 0.5)

    @_safely
    def after_clip(self, label: str, norm: object, limit: object) -> None:
        """Keep the call, with the norm that it found."""
        found = None if norm is None else _to_float(norm)
        most = None if limit is None else _to_float(limit)
        self._add_call(label, norm=found, max_norm=most)

    @_safely
    def before_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Keep what the optimizer gets, and what its parameters are."""
        step = self._steps.get(id(optimizer), 0)
        self.step = max(self.step, step)
        self._add_call("optimizer step")
        if not self.settings.includes(step):
            return
        self.model.find_names(optimizer)
        self._keep_initial(optimizer)
        self._keep_options(optimizer, step)
        for shard in self.model.shards_of(optimizer):
            gradient = shard.tensor.grad
            keep_tensor(
                self._open(),
                self.settings.limit,
                step,
                Kind.GRADIENT,
                shard,
                gradient,
                before=self._norms.get(id(shard.tensor)),
            )
            self._before[id(shard.tensor)] = local_part(shard.tensor).detach().clone()

    @_safely
    def after_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Keep the updates; after the last step that is recorded, stop."""
        step = self._steps.get(id(optimizer), 0)
        if self.settings.includes(step):
            for shard in self.model.shards_of(optimizer):
                change = local_part(shard.tensor).detach() - self._before.pop(id(shard.tensor))
                keep_tensor(self._open(), self.settings.limit, step, Kind.UPDATE, shard, change)
        self._steps[id(optimizer)] = step + 1
        self.step = max(self._steps.values())
        if min(self._steps.values()) > self.settings.last:
            self.close()

    # How it ends ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the last line and stop."""
        # A child that was forked, such as a worker of a data loader, has the files of its parent.
        if not self.is_active or os.getpid() != self._pid:
            return
        self.is_active = False
        self.on_stop()
        if self._file is not None:
            try:
                self._file.add(End(num_steps=self.step))
            except OSError as error:
                _warn(f"the last line was not written: {error}")
            self._file.close()

    def fail(self, error: Exception) -> None:
        """Stop recording, and say why; what was written stays usable."""
        self.is_active = False
        self.on_stop()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        _warn(f"recording stopped at step {self.step}: {type(error).__name__}: {reason}; the script goes on")
        if self._file is not None:
            with suppress(OSError):  # the same disk
                self._file.add(Note(about="stopped", text=f"{type(error).__name__}: {reason}"))
            self._file.close()

    # What is kept --------------------------------------------------------------------------------------------

    @_safely
    def _enter_model(self, module: nn.Module, frame: Any, trains: bool) -> None:
        if self.model.add(module):
            self._prepare(module)
        if not trains or not self._records():
            return
        self._add_call("forward")
        for name, tensor in find_rows(frame):
            rows = hash_rows(tensor)[:_MOST_ROWS]
            self._open().add(
                Rows(step=self.step, name=name, shape=tuple(tensor.shape), rows=tuple(rows.tolist()))
            )

    def _prepare(self, module: nn.Module) -> None:
        """Put other weights into a model that is seen for the first time, and note what draws random numbers."""
        self.on_model()
        if self.settings.weights is not None:
            from moeverify.capture.weights import load_weights

            load_weights(module, self.settings.weights, *self._find_rank())
        if self.settings.nudge is not None:
            from moeverify.capture.weights import nudge_weights

            nudge_weights(module, self.settings.nudge)
        for text in find_dropout(module):
            self._open().add(Note(about="dropout", text=text))

    @_safely
    def _look_inside(self, inputs: tuple[Any, ...]) -> None:
        narrower = compute_dtype(inputs)
        if narrower and narrower not in self.model.dtypes:
            self.model.dtypes.add(narrower)
            self._open().add(Note(about="dtype", text=narrower))

    def _keep_initial(self, optimizer: Optimizer) -> None:
        for shard in self.model.shards_of(optimizer):
            if id(shard.tensor) not in self._has_initial:
                self._has_initial.add(id(shard.tensor))
                # Whole whatever the limit: places are found by these values, and other runs load them.
                keep_tensor(self._open(), sys.maxsize, INITIAL, Kind.INITIAL_WEIGHT, shard, shard.tensor)

    def _keep_options(self, optimizer: Optimizer, step: int) -> None:
        name = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            numbers = {key: _to_float(value) for key, value in group.items() if _is_numeric(value)}
            for key, value in group.items():
                if isinstance(value, tuple) and all(map(_is_numeric, value)):
                    numbers.update({f"{key}[{n}]": _to_float(each) for n, each in enumerate(value)})
            names = tuple(shard.name for shard in self.model.shards_of(optimizer, number))
            self._open().add(Options(step=step, optimizer=name, number=number, options=numbers, names=names))

    def _measure_gradients(self) -> dict[int, float]:
        """Return the norm of each parameter's local gradient, by the id of the parameter."""
        found = [
            (id(shard.tensor), local_part(shard.tensor.grad))
            for shard in self.model.shards()
            if shard.tensor.grad is not None
        ]
        by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for key, local in found:
            by_kind.setdefault((local.device, local.dtype), []).append((key, local))
        norms: dict[int, float] = {}
        for members in by_kind.values():
            values = torch.stack(torch._foreach_norm([local for _, local in members])).tolist()
            norms.update(zip((key for key, _ in members), values, strict=True))
        return norms

    def _add_call(self, name: str, **rest: Any) -> None:
        if self.model.roots and self._records():
            self._open().add(Call(step=self.step, name=name, site=_find_site(), **rest))

    def _records(self) -> bool:
        return self.settings.includes(self.step) and os.getpid() == self._pid

    def _find_rank(self) -> tuple[int, int]:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._launched

    def _open(self) -> RankFile:
        if self._file is None:
            rank, world_size = self._find_rank()
            self._file = RankFile(self.settings.out, rank)
            header = Header(
                rank=rank,
                world_size=world_size,
                host=socket.gethostname(),
                pid=self._pid,
                script=" ".join(sys.argv),
                torch=torch.__version__,
                first=self.settings.first,
                last=self.settings.last,
                nudge=self.settings.nudge,
            )
            self._file.add(header)
        return self._file


def _find_site() -> str:
    """Return file:line of the code that called into torch, as the script's author would name it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")) and not file.endswith("contextlib.py"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_numeric(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _to_float(value: Any) -> float:
    return float(value.full_tensor()) if hasattr(value, "full_tensor") else float(value)


def _warn(text: str) -> None:
    sys.stderr.write(f"moeverify watch: {text}\n")
