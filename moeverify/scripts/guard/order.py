"""Rules for the order of calls on one rank, which count as broken after two sampled steps in a row.

A single violation is no error: a script may discard the gradients of a bad batch on purpose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.results.finding import Finding, make_finding
from moeverify.results.script import CallFacts, CallRule, ScriptCheck
from moeverify.train.calls.call import LoopCall
from moeverify.train.calls.options import find_option_sites
from moeverify.train.calls.rules import (
    backward_range,
    drop_skipped,
    find_discarded,
    find_emptied,
    find_eval,
    find_inner_schedule,
    find_misplaced_clip,
    find_scaled_clip,
    find_scaled_step,
)

_TIMES = 2


@dataclass
class _Epochs:
    """The last epoch of a sampler on whose order the model was trained, and the epoch of the last iteration.

    `current` is None when the iteration is over. An iteration counts from its first optimizer step: one that
    is left before it only looks at a batch.
    """

    trained: int | None = None
    current: int | None = None
    site: str = ""
    has_stepped: bool = False


class CallOrder:
    """The violations so far, and the optimizers with their parameters."""

    def __init__(self) -> None:
        self.has_scaler = False
        self.is_idle = True  # whether no optimizer has ever got a gradient
        self.is_replaced = False  # whether optimizers hold an old copy of the parameters that have none
        self._trained: set[int] = set()  # parameters that an optimizer has got a gradient of
        self._optimizers: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()  # optimizers that have stepped in the current step
        self._stepped_before: set[int] = set()
        self._streaks: dict[CallRule, int] = {}
        self._broken: list[CallFacts] = []
        self._kept = 0.0
        self._renewed: CallFacts | None = None  # of an optimizer that has replaced another one
        self._has_gradients = False
        self._num_steps = 0
        self._has_trained = False  # whether a step had forward passes in training mode
        self._epochs: WeakKeyDictionary[DistributedSampler[Any], _Epochs] = WeakKeyDictionary()

    def see_step(self, optimizer: Optimizer, kept: Mapping[int, float]) -> None:
        """Add an optimizer's step; `kept` has gradient norms before the first backward pass, by parameter."""
        parameters = _list_ids(optimizer)
        for key, each in list(self._optimizers.items()):
            if each.state and not optimizer.state and parameters == _list_ids(each):
                del self._optimizers[key]
                site = next(iter(find_option_sites(optimizer.param_groups[0]).values()), "")
                self._renewed = CallFacts(rule=CallRule.NEW_OPTIMIZER, site=site, expected=1, actual=2)
        self._optimizers[id(optimizer)] = optimizer
        self._stepped.add(id(optimizer))
        given = (each for group in optimizer.param_groups for each in group["params"])
        got = {id(each) for each in given if each.grad is not None}
        self._trained |= got
        self._has_gradients |= bool(got)
        self.is_idle &= not got
        # Alternating optimizers leave gradients to each other, and zero them before use.
        if id(optimizer) in self._stepped_before:
            own = (kept.get(id(each), 0.0) for group in optimizer.param_groups for each in group["params"])
            self._kept = max(self._kept, math.hypot(*own))

    def begin_epoch(self, sampler: DistributedSampler[Any], site: str) -> None:
        """Add an iteration over a sampler."""
        epochs = self._epochs.setdefault(sampler, _Epochs())
        epochs.current, epochs.site, epochs.has_stepped = sampler.epoch, site, False

    def end_epoch(self, sampler: DistributedSampler[Any]) -> None:
        """Add the end of an iteration over a sampler: later steps are not trained on it."""
        if sampler in self._epochs:
            self._epochs[sampler].current = None

    def see_training(self) -> None:
        """Add an optimizer step, sampled or not, to the iterations that are not over.

        Two iterations of training in a row must not have the same epoch, since they then have the same order.
        """
        for sampler, epochs in self._epochs.items():
            number = epochs.current
            if number is None or epochs.has_stepped or not sampler.shuffle:
                continue
            if number == epochs.trained:
                facts = CallFacts(rule=CallRule.SAME_EPOCH, site=epochs.site, expected=number, actual=2)
                self._broken.append(facts)
            epochs.trained, epochs.has_stepped = number, True

    def end_step(
        self,
        calls: Sequence[LoopCall],
        rows: Sequence[tuple[int, ...]],
        *,
        has_closure: bool = False,
        num_dropouts: int = 0,
    ) -> None:
        """Check the calls of a step against the rules.

        No rule applies with a closure: the optimizer (LBFGS) then calls zero_grad and backward any number
        of times.
        """
        self.has_scaler |= any(call.name.startswith("scaler") for call in calls)
        calls = drop_skipped(calls)
        names = [call.name for call in calls]
        self._num_steps += 1
        # Two passes over the same rows (sharpness-aware minimization) discard the first gradients on purpose.
        broken: list[CallFacts | None] = [find_scaled_clip(calls), find_scaled_step(calls), self._renewed]
        broken += [] if _repeats(rows) else [find_misplaced_clip(calls)]
        self._has_trained |= "forward" in names
        in_eval = find_eval(calls) if self._has_trained or num_dropouts else None
        broken += [None if in_eval is None else in_eval.model_copy(update={"expected": num_dropouts})]
        # Several optimizers share a backward pass, and zero gradients that another optimizer's loss has
        # left.
        if len(self._optimizers) == 1:
            broken += [None if _repeats(rows) else find_discarded(calls), find_inner_schedule(calls)]
            broken += [] if self._has_gradients else [find_emptied(calls)]
        first, last = backward_range(calls)
        zeroes_between = any(call.name == "zero_grad" for call in calls[first:last])
        if self._kept > 0.0 and "backward" in names and not (zeroes_between and len(self._optimizers) > 1):
            site = calls[first].site
            broken.append(CallFacts(rule=CallRule.KEPT, site=site, expected=1, norm=self._kept))
        found = {} if has_closure else {facts.rule: facts for facts in broken if facts is not None}
        self._streaks = {rule: self._streaks.get(rule, 0) + 1 for rule in found}
        self._broken += [facts for rule, facts in found.items() if self._streaks[rule] == _TIMES]
        self._stepped_before, self._stepped = self._stepped, set()
        self._kept, self._has_gradients, self._renewed = 0.0, False, None

    def list_unjudged(self, *, has_closure: bool) -> list[str]:
        """Return the rules that do not apply to this script, with the reason."""
        found = []
        if has_closure:
            found.append("order of calls: the optimizer calls a closure")
        elif len(self._optimizers) > 1:
            found.append("zero_grad and schedulers between backward passes: several optimizers share these")
        if self.has_scaler:
            found.append("infinite gradients: a gradient scaler makes them, and skips their steps")
        return found

    def find(self, step: int, rank: int) -> list[Finding]:
        """Return a finding for each rule that was broken often enough since the last call."""
        broken, self._broken = self._broken, []
        return [
            make_finding(
                ScriptCheck.CALLS,
                facts.rule.value,
                step,
                (rank,),
                facts,
                error=float(max(facts.actual, 1)),
            )
            for facts in broken
        ]

    def find_forgotten(self, shards: Sequence[LocalShard]) -> tuple[str, ...]:
        """Return the names of the parameters that have gradients but no optimizer.

        Empty before the second sampled step, and if more than half of the parameters have no optimizer:
        optimizers then hold copies of the parameters, which get gradients. Copies without gradients are
        those of a model that was wrapped, copied or moved later.
        """
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        known = {id(each): each for group in groups for each in group["params"]}
        others = [shard for shard in shards if id(shard.tensor) not in known]
        if self._num_steps < _TIMES:
            return ()
        found = [shard for shard in others if shard.tensor.grad is not None]
        old = Counter(tuple(each.shape) for key, each in known.items() if key not in self._trained)
        new = Counter(tuple(shard.tensor.shape) for shard in found)
        self.is_replaced = self.is_idle or 2 * (old & new).total() > len(found) > 0
        if 2 * len(others) > len(shards) and not self.is_replaced:
            return ()
        return tuple(shard.name for shard in found)


def _list_ids(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def _repeats(rows: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the micro-batches of a step consist of two halves with equal rows."""
    half = len(rows) // 2
    return half > 0 and tuple(rows[:half]) == tuple(rows[half:])
