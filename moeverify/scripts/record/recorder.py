"""The recorder of one process, which receives forward, backward and optimizer calls and writes lines."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moeverify.errors import FormatError
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.observer import INITIAL
from moeverify.parallel.regions.placement import local_part
from moeverify.results.checks import Kind
from moeverify.scripts.record.draw import find_draw, list_batch
from moeverify.scripts.record.lines import REDUCES, Header, Note, Rows, ScriptEnd
from moeverify.scripts.record.listener import ModelListener, identify
from moeverify.scripts.record.model import (
    compute_dtype,
    find_dropout,
    find_rows,
    has_parameters,
    hash_rows,
    is_number,
)
from moeverify.scripts.record.options import list_options
from moeverify.scripts.record.outputs import ModuleOutputs
from moeverify.scripts.record.rank_file import RankFile
from moeverify.scripts.record.reductions import StepReductions
from moeverify.scripts.record.replay import Pass, Replay, keep_batch
from moeverify.scripts.record.settings import Settings
from moeverify.scripts.record.tensors import hash_random, keep_tensor
from moeverify.train.calls.call import LoopCall
from moeverify.train.calls.listener import find_enclosing_step, find_scale, find_site, safely, to_float

if TYPE_CHECKING:
    from moeverify.scripts.record.executed import CodeRecorder
    from moeverify.scripts.record.operators import StepOperators

_MOST_ROWS = 4096


class ScriptRecorder(ModelListener):
    """A recorder of the optimizer steps in the settings."""

    def __init__(self, settings: Settings, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.settings = settings
        self.step = 0
        self._file: RankFile | None = None
        # Keyed by the optimizer itself: the id of a deleted optimizer may be reused.
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._before: dict[int, Tensor] = {}  # id of the parameter -> its value before the step
        self._norms: dict[
            int, float
        ] = {}  # id of the parameter -> norm of its gradient after the last backward pass
        self._reductions = StepReductions()
        self._target = 0
        self._forwards = (0, 0)  # step, and number of its training forward passes
        self._outputs = ModuleOutputs(self._open, settings.limit, self.fail) if settings.outputs else None
        self._replay: Replay | None = None
        self._has_mixed_passes = False
        self._operators: StepOperators | None = None
        self._code: CodeRecorder | None = None
        if settings.operators is not None:
            from moeverify.scripts.record.operators import StepOperators

            self._operators = StepOperators(settings.operators, settings.limit)
            self.unseen = self._operators.unseen
        if settings.code:
            from moeverify.scripts.record.executed import CodeRecorder

            self._code = CodeRecorder()
        self._has_initial: set[tuple[int, str]] = set()
        self._own: dict[int, int] = {}  # id of the parameter -> hash of its values before they were changed
        self._stepped: set[int] = set()  # ids of parameters that the model keeps alive
        atexit.register(self.close)

    # Calls from hooks
    # -----------------------------------------------------------------------------------------

    @safely
    def note_call(self, label: str, owner: object = None) -> None:
        """Record a call of the training loop."""
        super().note_call(label, owner)
        self._add_call(label, scale=find_scale(owner) if self._records() else None)

    @safely
    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Record the call with its loss, and keep the current norms of the gradients."""
        losses = tuple(float(root) for root in roots if is_number(root)) if self._records() else ()
        self._add_call("backward", losses=losses)
        if self._records():
            self._norms = self.measure_gradients()

    @safely
    def before_zero_grad(self) -> None:
        """Record the call and the norm of the gradients that it discards."""
        norms = self.measure_gradients().values() if self._records() else ()
        self._add_call("zero_grad", discarded=sum(norm**2 for norm in norms) ** 0.5)

    @safely
    def before_clip(self, label: str, parameters: Any) -> None:
        """Remember the parameters of a clip."""
        self._target = identify(parameters)

    @safely
    def after_clip(self, label: str, norm: object, limit: object) -> None:
        """Record the call with its norm and limit."""
        found = None if norm is None else to_float(norm)
        most = None if limit is None else to_float(limit)
        self._add_call(label, norm=found, max_norm=most, target=self._target)

    @safely
    def before_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Record gradients, options and initial weights of the optimizer.

        Its step includes the steps of optimizers that it calls.
        """
        if find_enclosing_step(optimizer) is not None:
            return
        step = self._find_step(optimizer)
        self.step = max(self.step, step)
        self._add_call("optimizer step", scale=find_scale(self.scaler))
        if not self.settings.includes(step):
            return
        self.model.find_names(optimizer)
        self._keep_initial(optimizer)
        for options in list_options(optimizer, self.model, step):
            self._open().add(options)
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
            if id(shard.tensor) not in self._before:
                self._before[id(shard.tensor)] = local_part(shard.tensor).detach().clone()
        self._reductions.begin(self.model.shards_of(optimizer))

    @safely
    def after_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Record the updates; after the last step of the settings, stop."""
        enclosing = find_enclosing_step(optimizer)
        if enclosing is not None:
            self._keep_inner_state(optimizer, enclosing)
            return
        step = self._find_step(optimizer)
        if self.settings.includes(step):
            site = self._reductions.end()
            if site is not None:
                self._open().add(Note(about=REDUCES, text=site, step=step))
            for shard in self.model.shards_of(optimizer):
                self._stepped.add(id(shard.tensor))
                change = local_part(shard.tensor).detach() - self._before[id(shard.tensor)]
                keep_tensor(self._open(), self.settings.limit, step, Kind.UPDATE, shard, change)
                self._keep_state(optimizer, step, shard)
            for shard in self.model.shards_of(optimizer):
                self._before.pop(id(shard.tensor), None)
        if self._operators is not None and step == self._operators.step:
            self._open()  # creates the folder if needed
            self._operators.end(self.settings.out, *self.find_rank())
        self._steps[optimizer] = step + 1
        if self._code is not None and step + 1 > self.step:
            executed = self._code.end_step(step)
            if executed.files:
                self._open().add(executed)
            self._code.follow(self.settings.includes(step + 1))
        self.step = max(self.step, step + 1)
        if min(self._steps.values()) > self.settings.last:
            self.close()

    # End
    # ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the last line and stop."""
        # A forked child, such as a data loader worker, shares its parent's files.
        if not self.is_active or os.getpid() != self.pid:
            return
        self._stop()
        if self.model.roots:
            try:
                # Also without recorded steps: the line has the script's number of steps.
                self._open().add(ScriptEnd(num_steps=self.step))
            except OSError as error:
                _warn(f"the last line was not written: {error}")
        if self._file is not None:
            self._file.close()
        self.model.forget()

    def fail(self, error: Exception) -> None:
        """Stop recording and report why. Lines that were written stay usable."""
        self._stop()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        _warn(f"recording stopped at step {self.step}: {type(error).__name__}: {reason}; the script goes on")
        if self._file is not None:
            with suppress(OSError):  # may be the same disk error
                self._file.add(Note(about="stopped", text=f"{type(error).__name__}: {reason}"))
            self._file.close()

    def _stop(self) -> None:
        self.is_active = False
        self.on_stop()
        if self._replay is not None:
            self._replay.leave_model()
        if self._outputs is not None:
            self._outputs.end()
            self._outputs.remove()
        if self._operators is not None:
            self._operators.stop()
        if self._code is not None:
            self._code.follow(False)

    # Recorded data
    # --------------------------------------------------------------------------------------------

    @safely
    def enter_model(self, module: nn.Module, frame: Any, learns: bool) -> None:
        self.take_model(module)
        if self._outputs is not None:
            self._outputs.end()
        if not learns or not has_parameters(module):
            return
        if not module.training:
            self._add_call("eval forward")
        if not module.training or not self._records():
            return
        self._add_call("forward")
        number = self._forwards[1] if self._forwards[0] == self.step else 0
        self._forwards = self.step, number + 1
        self._take_batch(module, number, frame)
        sizes = None
        for name, tensor in find_rows(frame):
            rows = tuple(hash_rows(tensor)[:_MOST_ROWS].tolist())
            shape = tuple(tensor.shape)
            sizes = sizes or (shape[0], shape[1])
            line = {"step": self.step, "forward": number, "name": name, "shape": shape, "rows": rows}
            self._open().add(Rows.model_validate({**line, "site": find_draw(frame, tensor)}))
        if frame is None:
            self._open().add(Note(about="bypass", text=type(module).__name__, step=self.step))
        if self._outputs is not None:
            self._outputs.begin(self.step, number, sizes)
        if self._operators is not None:
            self._operators.begin(self.step, module, self.model.name_shards(module))

    def _take_batch(self, module: nn.Module, number: int, frame: Any) -> None:
        """Record the batch of a forward pass, and replace it first if batches are replayed."""
        batch = list_batch(frame)
        model = next((place for place, root in enumerate(self.model.roots) if root is module), 0)
        place = Pass(self.step, number, model)
        if self.settings.replay is not None:
            if self._replay is None:
                self._replay = Replay(self.settings.replay, mixes=self._operators is None)
                if self.find_rank()[1] > 1:
                    raise FormatError("batches were not replayed", "run the script on one device")
                self._open().add(Note(about="replay", text=self._replay.describe()))
            self._replay.replace(place, batch)
            self._note_mixed_passes()
        keep_batch(self._open(), self.settings.limit, place, batch, frame)

    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End the replay of random numbers with the pass of the model; see `Listener`."""
        super().leave_module(module, inputs, output)
        if not self.is_in_model:
            self._end_replay()

    @safely
    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.leave_model()
            self._note_mixed_passes()

    def _note_mixed_passes(self) -> None:
        if self._replay is not None and self._replay.has_mixed_passes and not self._has_mixed_passes:
            self._has_mixed_passes = True
            self._open().add(Note(about="mixed", step=self.step))

    def take_model(self, module: nn.Module) -> None:
        """Register a model, and prepare it if it is new."""
        if self.model.add(module):
            self._prepare(module)

    def _prepare(self, module: nn.Module) -> None:
        """Load or nudge the weights of a new model as requested, hook its modules, and note its dropout."""
        self.on_model()
        if self.settings.weights is not None or self.settings.nudge is not None:
            shards = self.model.name_shards(module)
            self._own |= {id(shard.tensor): hash_random(shard.local()) for shard in shards}
        if self.settings.weights is not None:
            from moeverify.scripts.record.weights import load_weights

            shards = self.model.name_shards(module)
            load_weights(shards, self.settings.weights, *self.find_rank())
        if self.settings.nudge is not None:
            from moeverify.scripts.record.weights import nudge_weights

            dtype = self.settings.nudge_dtype
            nudge_weights(
                self.model.name_shards(module),
                self.settings.nudge,
                None if dtype is None else getattr(torch, dtype),
            )
        if self._outputs is not None:
            self._outputs.watch(self.model.name_modules(module))
        names = [shard.name for shard in self.model.name_shards(module)]
        number = len(self.model.roots) - 1
        if names and names[0].startswith(f"model{number}."):
            text = f"{type(module).__name__}, first called in step {self.step}, is model{number}"
            self._open().add(Note(about="model", text=text))
        for text in find_dropout(module):
            self._open().add(Note(about="dropout", text=text))

    @safely
    def enter_inner(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the module's call site, and the dtype that the model computes in; see `Listener`."""
        self.model.note_use(module)
        if self.step != self.settings.first:
            return
        narrower = compute_dtype(inputs)
        if narrower and narrower not in self.model.dtypes:
            self.model.dtypes.add(narrower)
            self._open().add(Note(about="dtype", text=narrower))

    def _find_step(self, optimizer: Optimizer) -> int:
        """Return the number of the optimizer's current step.

        Two optimizers that step in turn both begin with step 0. An optimizer that first steps later begins
        with the next step. This happens if a model is built again, or after another one was trained.
        """
        if optimizer not in self._steps:
            groups = [group["params"] for group in optimizer.param_groups]
            is_again = any(id(parameter) in self._stepped for group in groups for parameter in group)
            self._steps[optimizer] = self.step if is_again or self.step > 1 else 0
        return self._steps[optimizer]

    def _keep_initial(self, optimizer: Optimizer) -> None:
        missing = [
            shard
            for shard in self.model.shards_of(optimizer)
            if (id(shard.tensor), shard.name) not in self._has_initial
        ]
        uses = self.model.find_uses() if missing else {}
        for shard in missing:
            self._has_initial.add((id(shard.tensor), shard.name))
            # Whole tensors despite the limit: they locate shards by value, and other runs may load them.
            keep_tensor(
                self._open(),
                sys.maxsize,
                INITIAL,
                Kind.INITIAL_WEIGHT,
                shard,
                shard.tensor,
                own=self._own[key] if (key := id(shard.tensor)) in self._own else hash_random(shard.local()),
                site=uses.get(id(shard.tensor), ""),
            )

    def _keep_inner_state(self, optimizer: Optimizer, enclosing: Optimizer) -> None:
        step = self._find_step(enclosing)
        if optimizer is not enclosing and self.settings.includes(step):
            for shard in self.model.shards_of(optimizer):
                self._keep_state(optimizer, step, shard)

    def _keep_state(self, optimizer: Optimizer, step: int, shard: LocalShard) -> None:
        """Record state in the parameter's shape: moments, but no step counters or factored moments."""
        for key, value in optimizer.state.get(shard.tensor, {}).items():
            if isinstance(value, Tensor) and value.shape == shard.tensor.shape and value.is_floating_point():
                named = replace(shard, name=f"{shard.name}.{key}")
                keep_tensor(self._open(), self.settings.limit, step, Kind.OPTIMIZER_STATE, named, value)

    def _add_call(self, name: str, **rest: Any) -> None:
        if self.model.roots and self._records():
            self._open().add(LoopCall(step=self.step, name=name, site=find_site(), **rest))

    def _records(self) -> bool:
        return self.settings.includes(self.step) and os.getpid() == self.pid

    def _open(self) -> RankFile:
        if self._file is None:
            rank, world_size = self.find_rank()
            header = Header(
                rank=rank,
                world_size=world_size,
                host=socket.gethostname(),
                pid=self.pid,
                script=" ".join(sys.argv),
                torch=torch.__version__,
                first=self.settings.first,
                last=self.settings.last,
                nudge=self.settings.nudge,
                nudge_dtype=self.settings.nudge_dtype,
            )
            file = RankFile(self.settings.out, rank)
            file.add(header)
            self._file = file  # only now: the first line of a file is its header
        return self._file


def _warn(text: str) -> None:
    sys.stderr.write(f"moeverify watch: {text}\n")
