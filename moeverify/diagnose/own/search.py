"""The search for the simplest mistakes that give what ranks have: bounded, in an order, and judged by the residual.

Of a discrete mistake nothing is fitted, and of others one number, where hundreds of elements must come out right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeverify.diagnose.own.replay import Candidate, Replay
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.results.own_module import Mistake

RIGHT = 1e-9
"""Relative error to which the replay as it is must give the golden's own values: else it is not what was computed."""

SHARE = 1e-3
"""Of the error, what a mistake may leave of it."""

NARROW = 1e-6
"""Relative to the output, what it may leave in float64: models round to float32 inside, as norms and softmaxes do."""

LEAST_WRONG = 8
"""Elements that are wrong: of fewer a fitted number proves nothing."""

_MOST_RIVALS = 12
_STEPS = 10
_NOTHING = 1e-9
_NEARER = (1.2, 0.9, 0.7, 0.5, 0.3, 0.1)  # of the error, what each step of a fit must have left at most
_FARTHER = 100.0  # how much more than the best a rival may leave


@dataclass(frozen=True)
class Found:
    """The mistakes that explain, what the best leaves of the error, and where they hold; see `Mistaken`.

    `replayed` is what was called.
    """

    mistakes: tuple[Mistake, ...] = ()
    residual: float = 0.0
    ranks: tuple[int, ...] = ()
    tokens: tuple[int, int] | None = None
    num_tried: int = 0
    replayed: str = ""


@dataclass(frozen=True)
class _Fit:
    mistake: Mistake
    residual: float
    ranks: tuple[int, ...]


class Judge:
    """Compares what a mistake gives with what every rank has."""

    def __init__(self, tensor: WrongTensor, bound: float) -> None:
        self.tensor = tensor
        shards = [shard for shard in tensor.shards if shard.local is not None and shard.region.numel]
        self.wrong = [shard for shard in shards if not _error(shard, tensor) <= bound]
        self.right = [shard for shard in shards if _error(shard, tensor) <= bound]
        self.exact = max(tensor.exact, NARROW)
        self.masks: dict[int, Tensor] = {}

    @property
    def is_clear(self) -> bool:
        """Return whether enough is wrong, and all of it is numbers."""
        values = [shard.values() for shard in self.wrong]
        if not values or not all(bool(torch.isfinite(each).all()) for each in values):
            return False
        return sum(int(self._differs(shard).sum()) for shard in self.wrong) >= LEAST_WRONG

    def shape(self, value: Tensor | None) -> Tensor | None:
        """Return what was read in the shape of the golden's; None where it has another size."""
        expected = self.tensor.expected
        if value is None or value.numel() != expected.numel():
            return None
        return value.reshape(expected.shape)

    def leave(self, value: Tensor, shard: RankShard) -> float:
        """Return the share of a shard's error that is left."""
        found = shard.region.take(value).reshape(shard.region.local_shape)
        actual, expected = shard.values(), self.tensor.expected_of(shard)
        if id(shard) in self.masks:
            mask = self.masks[id(shard)]
            found, actual, expected = found[mask], actual[mask], expected[mask]
        error = float((actual - expected).norm())
        left = float((found - actual).norm())
        if not error or not math.isfinite(left):
            return math.inf
        allowed = min(SHARE, self.exact * float(expected.norm()) / error)
        return left / error if left / error <= allowed else math.inf

    def judge(self, value: Tensor) -> tuple[float, tuple[int, ...]] | None:
        """Return the share that is left, and the ranks that alone compute so; None where it is not what they have."""
        worst = 0.0
        for shard in sorted(self.wrong, key=lambda each: -_error(each, self.tensor)):
            left = self.leave(value, shard)
            if left == math.inf:
                return None
            worst = max(worst, left)
        spared = [shard for shard in self.right if not self._is_spared(value, shard)]
        return worst, tuple(sorted({shard.rank for shard in self.wrong})) if spared else ()

    def restrict(self) -> tuple[int, int] | None:
        """Judge wrong tokens alone from now on, and return how many of how many these are; None where all are."""
        wrong = {id(shard): self._find_wrong_tokens(shard) for shard in self.wrong}
        num_wrong, count = sum(int(m.sum()) for m in wrong.values()), sum(m.numel() for m in wrong.values())
        if not 0 < num_wrong < count:
            return None
        self.masks = wrong
        return num_wrong, count

    def _is_spared(self, value: Tensor, shard: RankShard) -> bool:
        right = self.tensor.expected_of(shard)
        found = shard.region.take(value).reshape(shard.region.local_shape)
        return float((found - right).norm()) <= self.exact * float(right.norm())

    def _differs(self, shard: RankShard) -> Tensor:
        expected = self.tensor.expected_of(shard)
        scale = float(expected.norm()) / math.sqrt(max(expected.numel(), 1))
        return ~((shard.values() - expected).abs() <= 10 * self.tensor.exact * scale)

    def _find_wrong_tokens(self, shard: RankShard) -> Tensor:
        return self._differs(shard).flatten(2).any(dim=-1)


def _error(shard: RankShard, tensor: WrongTensor) -> float:
    scale = float(tensor.expected_of(shard).norm()) or float(tensor.expected.norm()) or 1.0
    return tensor.error_of(shard) / scale


class Search:
    """Tries tiers of candidates, from simple to complex, and stops after the first one that explains."""

    def __init__(self, replay: Replay, judge: Judge, base: Tensor, most_runs: int) -> None:
        self.replay, self.judge, self.base = replay, judge, base
        self.most_runs = most_runs
        self.is_allowed: Callable[[Candidate, float], bool] = lambda candidate, number: True
        self.worst = max(judge.wrong, key=lambda each: (_error(each, judge.tensor), -each.rank))

    def run(self, tiers: Sequence[Iterable[Candidate]]) -> Found:
        """Return what the first tier that explains has, where the runs are not used up before it ends."""
        kept: list[tuple[Candidate, Tensor]] = []
        for tier in tiers:
            fits = []
            for candidate in tier:
                if self.replay.num_runs > self.most_runs:
                    return self._find_at_some_tokens(kept)
                if candidate.start is not None:
                    fits += list(self._fit(candidate))
                    continue
                value = self.judge.shape(self.replay.run(candidate.plant))
                if value is None:
                    continue
                fits += list(self._keep(candidate, value))
                if self._helps(value):
                    kept.append((candidate, value))
            if fits:
                return self._choose(fits)
        return self._find_at_some_tokens(kept)

    def _helps(self, value: Tensor) -> bool:
        """Return whether a mistake gives some of what is wrong, so that it may hold at the wrong tokens alone."""
        found = self.worst.region.take(value).reshape(self.worst.region.local_shape)
        actual, expected = self.worst.values(), self.judge.tensor.expected_of(self.worst)
        wrong = (actual - expected).abs() > 1e-6 * expected.abs().max()
        near = (found - actual).abs() <= 1e-6 * expected.abs().max()
        return bool((wrong & near).sum() * 2 >= wrong.sum()) and bool(wrong.any())

    def _find_at_some_tokens(self, kept: Sequence[tuple[Candidate, Tensor]]) -> Found:
        tokens = self.judge.restrict()
        if tokens is None:
            return Found(num_tried=self.replay.num_runs)
        fits = [fit for candidate, value in kept for fit in self._keep(candidate, value)]
        if not fits:
            return Found(num_tried=self.replay.num_runs)
        found = self._choose(fits)
        wrong, right = ({shard.rank for shard in shards} for shards in (self.judge.wrong, self.judge.right))
        ranks = tuple(sorted(wrong)) if right - wrong else ()
        return replace(found, ranks=ranks, tokens=tokens)

    def _keep(self, candidate: Candidate, value: Tensor) -> Iterator[_Fit]:
        judged = self.judge.judge(value)
        if judged is not None and self.is_allowed(candidate, 0.0):
            yield _Fit(candidate.mistake, *judged)

    def _choose(self, fits: Sequence[_Fit]) -> Found:
        """Return the mistakes that leave least; those that hold on all ranks before those that hold on some."""
        spared = [fit for fit in fits if not fit.ranks] or list(fits)
        best = min(fit.residual for fit in spared)
        allowed = max(best * _FARTHER, 1e-9)
        near = [fit for fit in spared if fit.residual <= allowed]
        mistakes = _drop_alike(_drop_inner(tuple(dict.fromkeys(fit.mistake for fit in near))))
        if len(mistakes) > _MOST_RIVALS:
            mistakes = mistakes[:_MOST_RIVALS]
        return Found(mistakes, near[0].residual, near[0].ranks, None, self.replay.num_runs)

    def _read(self, candidate: Candidate, number: float) -> Tensor | None:
        value = self.judge.shape(self.replay.run(candidate.plant, number))
        return None if value is None else self._of_worst(value)

    def _of_worst(self, value: Tensor) -> Tensor:
        return self.worst.region.take(value).reshape(self.worst.region.local_shape)

    def _fit(self, candidate: Candidate) -> Iterator[_Fit]:
        """Yield a candidate with the number that gives what the worst rank has, by Gauss-Newton steps."""
        assert candidate.start is not None
        actual, at = self.worst.values(), candidate.start
        value: Tensor | None = self._of_worst(self.base)
        assert value is not None
        error = float((actual - value).norm())
        left = error
        for count in range(_STEPS):
            width = 1e-4 * max(abs(at), 1e-3 if candidate.start else 1.0)
            if candidate.start and abs(candidate.start) < 1e-3:
                width = 1e-2 * max(abs(at), abs(candidate.start))
            further = self._read(candidate, at + width)
            if further is None or value is None:
                return
            slope = (further - value) / width
            square = float((slope * slope).sum())
            step = float((slope * (actual - value)).sum()) / square if square else 0.0
            if not math.isfinite(step) or step == 0.0:
                return
            # The part of the error along the slope: where there is almost none, no number of it helps.
            along = abs(step) * math.sqrt(square) / max(left, 1e-300)
            if count == 0 and along < 0.3:
                return
            at += step
            value = self._read(candidate, at)
            if value is None:
                return
            left = float((actual - value).norm())
            if not left <= error * _NEARER[min(count, len(_NEARER) - 1)]:
                return
            if left <= 1e-9 * error or abs(step) <= 1e-9 * abs(at):
                break
        yield from self._confirm(candidate, at)

    def _confirm(self, candidate: Candidate, at: float) -> Iterator[_Fit]:
        if abs(at) < _NOTHING:
            return  # of what is not there at all another mistake says so
        # A number of few digits, which somebody may have written, is tried first.
        for number in dict.fromkeys([*(float(f"{at:.{digits}g}") for digits in (1, 2, 3, 4, 6)), at]):
            if abs(number - at) > 1e-4 * max(abs(at), 1e-6) and abs(number) > 1e-6:
                continue
            value = self.judge.shape(self.replay.run(candidate.plant, number))
            judged = None if value is None else self.judge.judge(value)
            if (
                judged is not None
                and (judged[0] <= 1e-5 or number == at)
                and self.is_allowed(candidate, number)
            ):
                yield _Fit(candidate.mistake.model_copy(update={"number": number}), *judged)
                return


def _drop_inner(mistakes: Sequence[Mistake]) -> tuple[Mistake, ...]:
    """Return mistakes without those in a module inside of one that gives the same by the same way."""
    names = {(each.way, each.name) for each in mistakes if each.part == "child"}
    return tuple(
        each
        for each in mistakes
        if each.part != "child"
        or not any(way == each.way and each.name.startswith(f"{name}.") for way, name in names)
    )


def _drop_alike(mistakes: Sequence[Mistake]) -> tuple[Mistake, ...]:
    """Return mistakes with the first of those that are other constants of one step, or conditions that it makes."""
    found: dict[object, Mistake] = {}
    for number, each in enumerate(mistakes):
        is_constant = each.part == "step" and each.way in ("all-true", "all-false", "inverted", "value")
        found.setdefault((each.name, each.line, each.module) if is_constant else number, each)
    return tuple(found.values())
