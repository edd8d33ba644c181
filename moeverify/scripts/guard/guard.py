"""The guard of one process, which samples steps and writes a record of each sampled step for the judge."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.placement import is_partial, is_placed_alike, local_part
from moeverify.parallel.regions.unseen import unseen
from moeverify.scripts.guard.collective_watch import CollectiveWatch
from moeverify.scripts.guard.data_ranks import find_data_ranks
from moeverify.scripts.guard.detached import DetachedParts
from moeverify.scripts.guard.equal_experts import find_equal_experts
from moeverify.scripts.guard.exchange import RankOutbox
from moeverify.scripts.guard.finite import FiniteWatch
from moeverify.scripts.guard.groups import list_groups
from moeverify.scripts.guard.lines import Nonfinite, RankHeader, StepRecord
from moeverify.scripts.guard.loose import LooseParameters
from moeverify.scripts.guard.order import CallOrder
from moeverify.scripts.guard.row_stream import RowStream
from moeverify.scripts.guard.samples import count_positions, measure_samples
from moeverify.scripts.guard.sampling import Sampling, describe_tensors
from moeverify.scripts.guard.settings import GuardSettings
from moeverify.scripts.guard.update import UpdateWatch
from moeverify.scripts.record.draw import find_batch, find_draw
from moeverify.scripts.record.listener import ModelListener, identify, list_parameters, measure_norms
from moeverify.scripts.record.model import has_parameters, hash_rows, is_number, list_dropouts, unwrap
from moeverify.scripts.record.options import list_options
from moeverify.scripts.record.outputs import find_tensor
from moeverify.train.calls.call import LoopCall
from moeverify.train.calls.listener import find_enclosing_step, find_scale, find_site, is_inner_file, safely
from moeverify.verification.collectives.interception import Collective
from moeverify.verification.collectives.trace import CollectiveTrace

_MOST_ROWS = 4096
_MOST_CALLS = 512
_LEARNING_STEPS = 4
_MOST_LOSSES = 256  # unread losses, in a step that never ends
_MOST_BAD = 3  # nonfinite steps in a row to record outside the sample: later ones add no information


class Guard(ModelListener):
    """A sampler of steps. A step begins with the first forward pass after an optimizer step.

    It ends with the last optimizer step before the next such forward pass. Its collectives are those from
    the last optimizer step to the next one. Ranks communicate only through files, so a guard cannot make a
    script hang. `trace` records all the time, if given.
    """

    def __init__(
        self, settings: GuardSettings, rank: int, world_size: int, trace: CollectiveTrace | None = None
    ) -> None:
        super().__init__(rank, world_size)
        self.settings = settings
        self.step = 0
        self.is_sampled = settings.samples(0)
        self._has_stepped = False
        self._outbox: RankOutbox | None = None
        self._tensors: dict[int, int] = {}  # id of the parameter -> its number
        self._shards: list[LocalShard] = []
        self._finite = FiniteWatch()
        self._order = CallOrder()
        self._detached, self._loose = DetachedParts(), LooseParameters()
        self._learns = False  # whether the outermost pass has gradients
        self._collectives = CollectiveWatch(self._see_collective, trace)
        self._collectives.begin()
        self._stream = RowStream()
        self._updates: dict[int, UpdateWatch] = {}  # by id of the optimizer
        self._clips_by_torch = False
        self._target = 0
        self._num_bad = 0
        self._num_backward = 0
        self._sampling = Sampling()
        self._num_positions = 0  # of the first batch
        self._positions: dict[int, tuple[int, int]] = {}  # id of a module -> those of its output, features
        atexit.register(self.close)

    # Calls from hooks
    # -----------------------------------------------------------------------------------------

    @safely
    def enter_model(self, module: nn.Module, frame: Any, learns: bool) -> None:
        """Begin a new step if one is over, and keep the rows of the first integer input; see `Listener`."""
        if self.model.add(module):
            self.on_model()
            self.model.learn(module)
            self._finite.watch(module)
        self._learns = learns
        if not learns or not has_parameters(module):
            return
        self.model.note_use(module)
        if not unwrap(module).training:
            # A step begins with the first pass in training mode: an evaluation may forget to disable gradients.
            self._add_call("eval forward")
            self._sampling.num_off = len(list_dropouts(module, trains=False)) if self.is_sampled else 0
            return
        self._begin_step()
        self._collectives.note_thread()
        self._add_call("forward")
        if frame is None:
            name = type(module).__name__
            text = f"rows of the first pass: `{name}.forward` is called directly; `{name}` is taken for the model"
            self._sampling.unjudged.append(text)
        tensor = find_batch(frame)
        if tensor is None:
            return
        self._stream.add(tensor)
        self._num_positions = self._num_positions or count_positions(tensor)[0]
        if self.is_sampled:
            self._sampling.rows.append(tuple(hash_rows(tensor)[:_MOST_ROWS].tolist()))
            self._sampling.data_site = self._sampling.data_site or find_draw(frame, tensor)

    @safely
    def enter_inner(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Keep the call sites of modules; see `Listener`."""
        if self._learns:
            self.model.note_use(module)

    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Count the positions in the first output of each module; see `Listener`."""
        super().leave_module(module, inputs, output)
        if self._learns and self.step == 0 and id(module) not in self._positions:
            self._note_output(module, output)

    @safely
    def _note_output(self, module: nn.Module, output: Any) -> None:
        tensor = find_tensor(output)
        self._positions[id(module)] = (0, 0) if tensor is None else count_positions(tensor)

    @safely
    def begin_epoch(self, sampler: DistributedSampler[Any]) -> None:
        """Remember that a sampler begins; see `Listener`."""
        self._order.begin_epoch(sampler, find_site())

    @safely
    def end_epoch(self, sampler: DistributedSampler[Any]) -> None:
        """Remember that a sampler is over; see `Listener`."""
        self._order.end_epoch(sampler)

    @safely
    def _see_collective(self, collective: Collective, frame: Any, operands: Any) -> None:
        self._collectives.see(collective, operands, is_in_model=self.is_in_model)

    @safely
    def before_backward(self) -> None:
        """Measure the gradients that the previous step left; see `Listener`."""
        self._begin_step()
        self._num_backward += 1
        self._collectives.note_backward()
        if self.is_sampled and not self._sampling.has_backward:
            self._sampling.kept = self.measure_gradients()
        self._sampling.has_backward = True

    @safely
    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Keep the loss and measure the gradients; see `Listener`."""
        for root in roots:
            if is_number(root):
                self._finite.add_loss(root)
        if self._finite.num_losses > _MOST_LOSSES:
            self._look_at_losses()
        self._add_call("backward")
        if self.is_sampled:
            self._detached.see_gradients(self.model.shards())
        if self.is_sampled and not self._clips_by_torch:
            self._sampling.before = self.measure_gradients()

    @safely
    def before_zero_grad(self) -> None:
        """Measure the discarded gradients; see `Listener`."""
        if self.is_sampled:
            norms = (
                self.measure_gradients().values()
                if self._sampling.has_backward and not self._has_stepped
                else ()
            )
            self._add_call("zero_grad", discarded=math.hypot(*norms))

    @safely
    def before_clip(self, label: str, parameters: Any) -> None:
        """Measure the gradients before the clip; see `Listener`."""
        if not self.is_sampled:
            return
        given = list_parameters(parameters)
        gradients = [(id(each), local_part(each.grad)) for each in given if each.grad is not None]
        self._sampling.clipped = measure_norms(gradients)
        self._target = identify(given)
        self._sampling.before |= self._sampling.clipped
        self._clips_by_torch = True

    @safely
    def after_clip(self, label: str, norm: Any, limit: Any) -> None:
        """Keep the norm from a clip; see `Listener`."""
        if not self.is_sampled:
            return
        most = None if limit is None else float(limit)
        self._add_call(label, target=self._target, max_norm=most)
        if label == "clip_grad_norm_":
            # Reading an unreduced norm would be a collective. The effect of the clip shows its value.
            is_known = norm is not None and not is_partial(norm)
            found = float(local_part(norm)) if is_known else None
            self._sampling.clips.append((found, most, dict(self._sampling.clipped)))

    @safely
    def note_call(self, label: str, owner: object = None) -> None:
        """Keep a call of the training loop; see `Listener`."""
        super().note_call(label, owner)
        self._add_call(label, scale=find_scale(owner) if self.is_sampled else None)

    @safely
    def before_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Sample the optimizer's inputs; see `Listener`.

        Of an optimizer that another one steps only the updates are checked, unless it is the same one.
        """
        enclosing = find_enclosing_step(optimizer)
        if enclosing is not None:
            if self.is_sampled and optimizer is not enclosing:
                self._watch_updates(optimizer)
            return
        has_closure = bool(values[1:] and values[1] is not None) or named.get("closure") is not None
        self._sampling.closures |= {id(optimizer)} if has_closure else set()
        self._end_collectives()
        if not self.is_sampled:
            return
        self._add_call("optimizer step", scale=find_scale(self.scaler))
        self.model.find_names(optimizer)
        self._sampling.options += list_options(optimizer, self.model, self.step)
        self._describe()
        self._order.see_step(optimizer, self._sampling.kept)
        self._sampling.forgotten = self._order.find_forgotten(self._shards)
        if not has_closure:
            self._sample_gradients(optimizer)
            shards = self.model.shards_of(optimizer)
            place = self.step, self.find_rank()[0]
            parts = self._detached.find(optimizer, shards, self.model.owners, self.model.uses, place)
            self._sampling.findings += parts + self._loose.find(self.model, place)
            self._watch_updates(optimizer)

    def _watch_updates(self, optimizer: Optimizer) -> None:
        self._updates[id(optimizer)] = UpdateWatch(optimizer, self.model.shards_of(optimizer))

    @safely
    def after_step(self, optimizer: Optimizer, values: Any, named: Any) -> None:
        """Sample the updated weights; see `Listener`."""
        enclosing = find_enclosing_step(optimizer)
        update = self._updates.pop(id(optimizer), None) if optimizer is not enclosing else None
        if update is not None:
            self._sampling.findings += update.finish(self.step, self.find_rank()[0])
            self._sampling.note_kind(optimizer, enclosing, update.list_unjudged())
        if enclosing is not None:
            return
        if self.is_sampled:
            if id(optimizer) in self._sampling.closures:
                self._sample_gradients(optimizer)
            own = [shard for shard in self.model.shards_of(optimizer) if id(shard.tensor) in self._tensors]
            self._sampling.stepped |= {id(shard.tensor) for shard in own}
            hashes = measure_samples([shard.local() for shard in own], only_hashes=True).hashes
            numbers = (self._tensors[id(shard.tensor)] for shard in own)
            self._sampling.after |= dict(zip(numbers, hashes, strict=True))
        self._has_stepped = True
        self._order.see_training()
        if self.settings.samples(self.step + 1):
            self._collectives.note_thread()
            self._collectives.begin()

    # Steps
    # ----------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Begin the next step if an optimizer has stepped."""
        if self._has_stepped:
            self._end_step()
            if self.step == 0:
                self._follow_models()
            self.step += 1
            self._has_stepped = False
            self.is_sampled = self.settings.samples(self.step)
            self._sampling = Sampling()
            self._finite.clear()
        self._finite.is_sampled = self.is_sampled

    def _follow_models(self) -> None:
        """Replace global hooks by hooks on the models: global ones cost each module call a microsecond."""
        self.on_stop()
        for model in self.model.roots:
            # The hook added here also ends the forward pass that has just begun. The pre-hook is prepended:
            # FSDP must not have gathered parameters.
            model.register_forward_pre_hook(unseen(self.enter_module), prepend=True)
            model.register_forward_hook(unseen(self.leave_module), always_call=True)

    def _end_step(self) -> None:
        self._look_at_losses()
        sampling = self._sampling
        if self.is_sampled and self._shards:
            if sampling.nonfinite is None and self.step < _LEARNING_STEPS:
                self._finite.learn()
            self._order.end_step(
                sampling.calls,
                sampling.rows,
                has_closure=bool(sampling.closures),
                num_dropouts=sampling.num_off,
            )
            if self._order.has_scaler:
                sampling.nonfinite = None  # the loss scale was too large
            sampling.findings += self._order.find(self.step, self.find_rank()[0])
            sampling.unjudged += self._order.list_unjudged(has_closure=bool(sampling.closures))
            self._leave(self._make_record())
        elif found := self._order.find(self.step, self.find_rank()[0]):
            self._leave(StepRecord(step=self.step, rank=self.find_rank()[0], findings=tuple(found)))
        if sampling.nonfinite is None:
            self._num_bad = 0
        elif not self.is_sampled and self._num_bad < _MOST_BAD:
            self._num_bad += 1
            self._leave(StepRecord(step=self.step, rank=self.find_rank()[0], nonfinite=sampling.nonfinite))

    def _leave(self, record: StepRecord) -> None:
        if self._outbox is None:
            self._outbox = RankOutbox(self.settings.out, record.rank)
        self._outbox.put(record)
        if self.settings.debug and (record.findings or record.nonfinite or self._outbox.has_findings()):
            self._stop_in_debugger(record)

    def _stop_in_debugger(self, record: StepRecord) -> None:
        import multiprocessing_pdb

        about = next((f"{each.check}: {each.tensor}" for each in record.findings), "another rank's finding")
        self.settings = self.settings.model_copy(update={"debug": False})  # stop only once
        multiprocessing_pdb.stop(f"moeverify watch --guard: {about}", frame=_find_frame())

    def _end_collectives(self) -> None:
        """Describe the collectives of the step before its first optimizer step."""
        watch, sampling = self._collectives, self._sampling
        if self._has_stepped or not self.is_sampled:
            watch.stop()
        elif sampling.groups is None:
            watch.end()
            sampling.groups, sampling.exchanged = watch.groups, tuple(sorted(watch.exchanged))
            sampling.is_traced, sampling.takes_any = watch.is_complete, watch.takes_any
            sampling.sums = watch.take_sums()

    def _look_at_losses(self) -> None:
        before = self._finite.find_bad_loss()
        if before is not None and self._sampling.nonfinite is None:
            self._locate_bad("loss", before)

    def _locate_bad(self, what: Literal["loss", "gradient"], before: int, name: str = "") -> None:
        """Store the first nonfinite value: a module output, or else the one after `before` outputs."""
        found = self._finite.find()
        if found is not None and found[0] < before:
            self._sampling.nonfinite = Nonfinite(what="output", order=found[0], module=found[1])
        else:
            self._sampling.nonfinite = Nonfinite(what=what, module=name, order=before)

    # Samples
    # --------------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Write the description of this rank, with the tensors of the models in the first step."""
        if self._shards:
            return
        shards = [shard for shard in self.model.shards() if shard.region.numel]
        # FSDP1 replaces the original parameters, which then get no gradients. Keep all if none has a
        # gradient: that is the error to find.
        self._shards = [shard for shard in shards if shard.tensor.grad is not None] or shards
        self._tensors = {id(shard.tensor): number for number, shard in enumerate(self._shards)}
        rank, world_size = self.find_rank()
        self._outbox = RankOutbox(self.settings.out, rank)
        positions = self.model.list_by_parameter(self._positions)
        header = RankHeader(
            rank=rank,
            world_size=world_size,
            tensors=describe_tensors(self._shards, self.model.find_uses(), positions),
            data_ranks=find_data_ranks(self.model.roots),
            num_positions=self._num_positions,
            groups=list_groups(),
        )
        self._outbox.put_header(header)
        self._sampling.began = measure_samples(
            [shard.local() for shard in self._shards], only_hashes=True
        ).hashes
        self._sampling.findings += find_equal_experts(self._shards, rank)

    def _sample_gradients(self, optimizer: Optimizer) -> None:
        own = [shard for shard in self.model.shards_of(optimizer) if id(shard.tensor) in self._tensors]
        found = [(shard, local_part(shard.tensor.grad)) for shard in own if shard.tensor.grad is not None]
        norms = measure_norms([(id(shard.tensor), local) for shard, local in found])
        hashes = measure_samples([local for _, local in found], only_hashes=True).hashes
        for (shard, _), bits in zip(found, hashes, strict=True):
            number = self._tensors[id(shard.tensor)]
            self._sampling.gradients[number] = bits, norms[id(shard.tensor)] ** 2
            if shard.tensor.grad is not None and not is_placed_alike(shard.tensor, shard.tensor.grad):
                self._sampling.partial.append(number)
        bad = next((shard.name for shard, _ in found if not math.isfinite(norms[id(shard.tensor)])), None)
        # With a scaler, nonfinite gradients are normal and their steps are skipped.
        self._look_at_losses()
        if bad is not None and self._sampling.nonfinite is None and not self._order.has_scaler:
            self._locate_bad("gradient", self._finite.num_calls, bad)

    def _make_record(self) -> StepRecord:
        sampling = self._sampling
        stepped = [shard.local() if id(shard.tensor) in sampling.stepped else None for shard in self._shards]
        ended = measure_samples(stepped)
        ids = [id(shard.tensor) for shard in self._shards]
        nothing = (0, 0.0)
        gradients = [sampling.gradients.get(number, nothing) for number in range(len(ids))]
        return StepRecord(
            step=self.step,
            rank=self.find_rank()[0],
            began=tuple(sampling.began),
            ended=tuple(ended.hashes),
            gradients=tuple(bits for bits, _ in gradients),
            projections=tuple(ended.projections),
            norms=tuple(ended.norms),
            squares=tuple(square for _, square in gradients),
            before=tuple(sampling.before[each] ** 2 if each in sampling.before else None for each in ids),
            partial=tuple(sampling.partial),
            forgotten=sampling.forgotten,
            is_idle=self._order.is_idle,
            is_replaced=self._order.is_replaced,
            is_known_kind=sampling.is_known_kind,
            clips=sampling.list_clips(self._tensors),
            rows=tuple(sampling.rows),
            losses=tuple(self._finite.values[:_MOST_LOSSES]),
            calls=tuple(sampling.calls),
            groups=sampling.groups or (),
            exchanged=sampling.exchanged,
            sums=sampling.sums,
            passes=self._stream.take(),
            num_backward=self._num_backward,
            is_traced=sampling.is_traced,
            takes_any=sampling.takes_any,
            data_site=sampling.data_site,
            stepped=tuple(sampling.after.get(number, 0) for number in range(len(ids))),
            options=tuple(sampling.options),
            outputs=self._finite.read(),
            unjudged=tuple(sampling.unjudged),
            nonfinite=sampling.nonfinite,
            findings=tuple(sampling.findings),
        )

    def _add_call(self, name: str, **rest: Any) -> None:
        if self.is_sampled and self.model.roots and len(self._sampling.calls) < _MOST_CALLS:
            self._sampling.calls.append(LoopCall(step=self.step, name=name, site=find_site(), **rest))

    # End
    # ------------------------------------------------------------------------------------------------------

    def switch(self, *, on: bool) -> None:
        """Turn the guard on or off."""
        self.is_active = self._finite.is_active = on

    def close(self) -> None:
        """Write the record of the last step and stop."""
        if not self.is_active or os.getpid() != self.pid:
            return
        self._finish()
        self.switch(on=False)
        self.on_stop()

    @safely
    def _finish(self) -> None:
        self._look_at_losses()
        if self._has_stepped:
            self._end_step()
        elif self._sampling.nonfinite is not None:
            self._leave(
                StepRecord(step=self.step, rank=self.find_rank()[0], nonfinite=self._sampling.nonfinite)
            )
        self._collectives.stop()

    def fail(self, error: Exception) -> None:
        """Stop guarding and report why; see `Listener`."""
        self.switch(on=False)
        self.on_stop()
        self._collectives.stop()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sys.stderr.write(
            f"moeverify watch: guarding stopped at step {self.step}: {type(error).__name__}: {reason}; the script "
            "goes on\n"
        )


def _find_frame() -> Any:
    """Return the frame of the script that called into torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_inner_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
