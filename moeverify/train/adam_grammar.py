"""Adam's moments and step in parts, with the ways in which other implementations, or mistakes, have them.

Letters: m and v are the moments after the step, of which the step is made, g the gradient after the clip, c1 and c2
the bias corrections.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from moeverify.case.schema import Optimizer
from moeverify.results.step_facts import StepChange
from moeverify.train.recomputation import StepValues
from moeverify.train.step_grammar import Grammar, Made, Solve, pick

if TYPE_CHECKING:
    from torch import Tensor

MEAN, SQUARE = "exp_avg", "exp_avg_sq"

KNOWN_ALONE = frozenset({"other-share", "other-beta", "other-kept", "no-decay-in-gradient"})
"""What the coefficients of a moment's own terms tell."""


_CLEARLY = 1.01
"""How many times its bound an element must be, to be one that tells the bound."""


def round_to_bfloat16(value: float) -> float:
    """Return the nearest number of 8 significant bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256.0) / 256.0, exponent)


def list_corrections(spec: Optimizer, number: int) -> Mapping[StepChange, tuple[float, float]]:
    """Return what both moments are divided by, by the way, at the step that `number` counts from 1."""
    right = _correct(spec.betas, number)
    return {name: way for name, way in _list_ways(spec, number).items() if way != right}


def list_correction_factors(spec: Optimizer, number: int) -> Mapping[StepChange, float]:
    """Return how many times the step is as large, by the way of its corrections, where epsilon is small.

    It is 1 where a way and the right one are the same in that step.
    """
    right = _correct(spec.betas, number)
    return {
        name: right[0] / first * (second / right[1]) ** 0.5
        for name, (first, second) in _list_ways(spec, number).items()
        if first
    }


def _correct(betas: tuple[float, float], number: int) -> tuple[float, float]:
    return 1.0 - betas[0] ** number, 1.0 - betas[1] ** number


def _list_ways(spec: Optimizer, number: int) -> Mapping[StepChange, tuple[float, float]]:
    first, second = _correct(spec.betas, number)
    rounded = round_to_bfloat16(spec.betas[0]), round_to_bfloat16(spec.betas[1])
    ways: dict[StepChange, tuple[float, float]] = {
        "no-correction": (1.0, 1.0),
        "no-first-correction": (1.0, second),
        "no-second-correction": (first, 1.0),
        "multiplied-by-corrections": (1.0 / first, 1.0 / second),
        "root-of-first-correction": (first**0.5, second),
        "second-correction-without-root": (first, second * second),
        "corrected-for-next-step": _correct(spec.betas, number + 1),
        "corrected-for-first-step": _correct(spec.betas, 1),
        "first-corrected-for-first-step": (_correct(spec.betas, 1)[0], second),
        "second-corrected-for-first-step": (first, _correct(spec.betas, 1)[1]),
        "corrected-with-bfloat16-betas": _correct(rounded, number),
        "corrected-with-swapped-betas": _correct(spec.betas[::-1], number),
        "corrected-with-first-beta": (first, first),
        "corrected-with-second-beta": (second, second),
    }
    if number > 1:
        before = _correct(spec.betas, number - 1)
        ways["corrected-for-step-before"] = before
        ways["first-corrected-for-step-before"] = (before[0], second)
        ways["second-corrected-for-step-before"] = (first, before[1])
    return ways


class AdamStep:
    """The change of a weight by its moments; `decays_weight` where the decay is taken from the weight (AdamW)."""

    def __init__(
        self, spec: Optimizer, step: StepValues, actual: Tensor, solve: Solve, *, decays_weight: bool
    ) -> None:
        self.spec, self.step, self.actual, self.solve = spec, step, actual, solve
        self.mean, self.square = step.after[MEAN], step.after[SQUARE]
        zeros = self.mean * 0.0
        self.old_mean, self.old_square = step.before.get(MEAN, zeros), step.before.get(SQUARE, zeros)
        self.decays_weight = decays_weight
        self.decay = step.weight_decay if decays_weight else 0.0
        self.corrections = list_corrections(spec, step.number)

    def grammar(self) -> Grammar:
        """Return the formula with its ways."""
        step = self.step
        parts: dict[str, list[StepChange]] = {
            "mean": ["old-mean", "gradient-for-mean", "nesterov", "nesterov-corrected-ahead"],
            "square": ["squared-gradient-for-square"],
            "corrections": list(self.corrections),
            "root": ["no-root", "fourth-root", "undivided"],
            "epsilon": [
                "epsilon-before-correction",
                "epsilon-in-root",
                "epsilon-squared-in-root",
                "epsilon-as-floor",
                "no-epsilon",
                "other-epsilon",
            ],
            "shape": ["sign-of-step", "bounded-step", "masked-by-gradient"],
        }
        if step.before:
            parts["square"] += ["old-square", "largest-square"]
        if self.decay and step.lr:
            parts["decay"] = [
                "no-decay",
                "decay-without-rate",
                "decay-after-step",
                "decay-reversed",
                "decay-with-corrections",
                "decay-by-squared-rate",
                "decay-of-step-alone",
            ]
        elif not self.decays_weight and step.weight_decay and step.lr:
            parts["decay"] = ["decay-at-weight"]
        return Grammar(parts, self.make)

    def make(self, ways: Collection[str]) -> Made:
        """Return the change by a formula with these ways."""
        first, second = self._correct(ways)
        mean, under = self._list_mean(ways, first) / first, self._list_square(ways) / second
        root = under.sqrt() if "no-root" not in ways else under
        root = under**0.25 if "fourth-root" in ways else root
        number = None
        if "other-epsilon" in ways:
            # change = -lr * mean / (root + eps) + decay, solved for eps: the change counts by its size.
            moved = self.actual - self._decay_by(ways, self.actual)
            number = self.solve(-self.step.lr * mean - moved * root, moved)
            number = number.where(number >= 0.0, math.nan)
            bottom = root + number
        else:
            bottom = self._add_epsilon(ways, under, root, second)
            bottom = bottom * 0.0 + 1.0 if "undivided" in ways else bottom
        direction = mean / bottom
        direction, bound = self._shape(ways, direction)
        moved = -self.step.lr * direction
        usual = self.spec.eps if "other-epsilon" in ways else None
        changed = moved + self._decay_by(ways, moved)
        # A decay by itself multiplies the weight, and rounds it, before the step.
        shrunk_by = 1.0 - self.step.lr * self.step.weight_decay if "decay-at-weight" in ways else None
        return Made(changed, bound if number is None else number, usual, shrunk_by)

    def _correct(self, ways: Collection[str]) -> tuple[float, float]:
        right = tuple(1.0 - beta**self.step.number for beta in self.spec.betas)
        found = [way for name, way in self.corrections.items() if name in ways]
        return found[0] if found else (right[0], right[1])

    def _list_mean(self, ways: Collection[str], first: float) -> Tensor:
        beta, gradient = self.spec.betas[0], self.step.gradient
        ahead = first / (1.0 - beta ** (self.step.number + 1))
        known = {
            "old-mean": self.old_mean,
            "gradient-for-mean": gradient * first,
            "nesterov": beta * self.mean + (1.0 - beta) * gradient,
            "nesterov-corrected-ahead": beta * ahead * self.mean + (1.0 - beta) * gradient,
        }
        return pick(known, ways, self.mean)

    def _list_square(self, ways: Collection[str]) -> Tensor:
        known = {
            "old-square": self.old_square,
            "squared-gradient-for-square": self.step.gradient**2,
            "largest-square": self.square.maximum(self.old_square),
        }
        return pick(known, ways, self.square)

    def _add_epsilon(self, ways: Collection[str], under: Tensor, root: Tensor, second: float) -> Tensor:
        eps = self.spec.eps
        known = {
            # A beta that bfloat16 rounds to 1 corrects by zero, and by no formula.
            "epsilon-before-correction": root + (eps / second**0.5 if second else math.nan),
            "epsilon-in-root": (under + eps).sqrt(),
            "epsilon-squared-in-root": (under + eps * eps).sqrt(),
            "epsilon-as-floor": root.clamp(min=eps),
            "no-epsilon": root,
        }
        return pick(known, ways, root + eps)

    def _shape(self, ways: Collection[str], direction: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the direction as it is taken, and the bound of its elements where it is solved for one."""
        if "sign-of-step" in ways:
            return direction.sign(), None
        if "masked-by-gradient" in ways:
            return direction * (direction * self.step.gradient > 0.0), None
        if "bounded-step" in ways and self.step.lr and "other-epsilon" not in ways:
            # What is beyond the bound is all that is moved otherwise.
            taken = (self.actual - self._decay_by(ways, self.actual)) / -self.step.lr
            beyond = direction.abs() > taken.abs() * _CLEARLY
            bound = self.solve(taken.abs() * beyond, beyond.to(direction.dtype))
            # Where nothing is within the bound, as where nothing moves, there is none.
            inside = ((taken != 0.0) & ~beyond).to(direction.dtype)
            bound = bound * self.solve(inside, inside)
            return direction.minimum(bound).maximum(-bound), bound
        return direction, None

    def _decay_by(self, ways: Collection[str], moved: Tensor) -> Tensor:
        """Return what the decay adds to a change by `moved` (N,)."""
        rate, weight = self.step.lr, self.step.weight
        if "decay-at-weight" in ways:
            return -rate * self.step.weight_decay * weight
        if not self.decay:
            return weight * 0.0
        decayed = -rate * self.decay * weight
        first, second = self._correct(())
        known = {
            "no-decay": 0.0 * decayed,
            "decay-reversed": -decayed,
            "decay-with-corrections": decayed * (second**0.5 / first),
            "decay-without-rate": -self.decay * weight,
            "decay-by-squared-rate": rate * decayed,
            "decay-after-step": decayed - rate * self.decay * moved,
            "decay-of-step-alone": -rate * self.decay * moved,
        }
        return pick(known, ways, decayed)


def list_added(step: StepValues, limit: float | None, *, decays: bool) -> Mapping[StepChange, Tensor]:
    """Return what a moment may take in the place of the gradient, by the way.

    A clip is made before the optimizer: where it `decays` by the gradient, the decay is added to what it clips.
    """
    gradient, zeros = step.gradient, step.gradient * 0.0
    decay = step.weight_decay * step.weight
    ways: dict[StepChange, Tensor] = {
        "decay-in-gradient": gradient + decay,
        "decay-against-gradient": gradient - decay,
        "sign-of-gradient": gradient.sign(),
        "gradient-times-rate": step.lr * gradient,
    }
    if not step.weight_decay:
        del ways["decay-in-gradient"], ways["decay-against-gradient"]
    if limit is not None and step.clip is not None:
        raw, added = gradient / step.clip, decay if decays else zeros
        ways["not-clipped"] = raw + added
        ways["clipped-by-value"] = raw.clamp(-limit, limit) + added
        ways["clipped-again"] = gradient * step.clip + added
    return {name: way + zeros for name, way in ways.items()}


class AdamMoment:
    """A moment: its own value of before, and what a step adds to it."""

    def __init__(
        self, spec: Optimizer, step: StepValues, name: str, actual: Tensor, solve: Solve, *, decays: bool
    ) -> None:
        """Take the formula of the moment `name`; `decays` where the decay is in the gradient by right (Adam)."""
        self.step, self.actual, self.solve = step, actual, solve
        self.is_square = name == SQUARE
        self.betas, self.decays = spec.betas, decays
        self.beta = spec.betas[1 if self.is_square else 0]
        self.eps = spec.eps
        self.old = step.before.get(name, step.gradient * 0.0)
        right = step.gradient + (step.weight_decay if decays else 0.0) * step.weight
        self.right = right * right if self.is_square else right
        added = list_added(step, spec.clip_norm, decays=decays)
        if decays and step.weight_decay:
            added = {**added, "no-decay-in-gradient": step.gradient}
            added.pop("decay-in-gradient", None)
        self.constants = self._find_constants(right) if MEAN in step.after else {}
        self.times = self._find_times() if self.is_square and MEAN in step.after else {}
        added = {**added, **{way: base + number for way, (base, number) in self.constants.items()}}
        decay = step.weight_decay * step.weight
        added = {**added, **{way: step.gradient + times * decay for way, times in self.times.items()}}
        self.added = {key: way * way if self.is_square else way for key, way in added.items()}
        if self.is_square:
            self.added = {**self.added, **self._list_squares(right)}

    def _find_times(self) -> Mapping[StepChange, Tensor]:
        """Return how many times the gradient has its weight decay, as the mean tells it, where it has it by right."""
        step, beta = self.step, self.betas[0]
        if not self.decays or not step.weight_decay:
            return {}
        taken = (step.after[MEAN] - beta * step.before.get(MEAN, step.gradient * 0.0)) / (1.0 - beta)
        return {"decay-times": self.solve(taken - step.gradient, step.weight_decay * step.weight)}

    def _find_constants(self, right: Tensor) -> Mapping[StepChange, tuple[Tensor, Tensor]]:
        """Return what a constant may be added to, and that constant, by the way; both moments have it of the mean."""
        step, beta = self.step, self.betas[0]
        bases: dict[StepChange, Tensor] = {"constant-in-gradient": right}
        if self.decays and step.weight_decay:
            bases["constant-for-decay"] = step.gradient
        taken = (step.after[MEAN] - beta * step.before.get(MEAN, right * 0.0)) / (1.0 - beta)
        ones, found = right * 0.0 + 1.0, {}
        for way, base in bases.items():
            number = self.solve(taken - base, ones)
            # A sum of many elements is rounded as often; that of what it leaves is not.
            found[way] = base, number + self.solve(taken - base - number, ones)
        return found

    def _list_squares(self, gradient: Tensor) -> Mapping[StepChange, Tensor]:
        mean = self.step.after.get(MEAN)
        found: dict[StepChange, Tensor] = {
            "not-squared": gradient.abs(),
            "root-of-gradient": gradient.abs().sqrt(),
        }
        if mean is not None:
            found["square-of-difference"] = (gradient - mean) ** 2
            found["square-of-mean"] = mean * mean
        if MEAN in self.step.before:
            found["square-of-old-difference"] = (gradient - self.step.before[MEAN]) ** 2
        return found

    def grammar(self) -> Grammar:
        """Return the formula with its ways."""
        parts: dict[str, list[StepChange]] = {"added": list(self.added), "sum": ["other-share", "largest"]}
        if self.step.before:
            parts["sum"] += ["other-beta", "other-kept", "undecayed"]
        else:
            parts["start"] = ["starts-at-weight", "starts-at-number"]
        if self.is_square:
            parts["epsilon"] = ["epsilon-in-moment"]
        return Grammar(parts, self.make, KNOWN_ALONE)

    def make(self, ways: Collection[str]) -> Made:
        """Return the moment by a formula with these ways."""
        added, rest = pick(self.added, ways, self.right), 1.0 - self.beta
        extra = self.eps if "epsilon-in-moment" in ways else 0.0
        number = None
        usual = {
            "other-share": rest,
            "other-beta": self.beta,
            "other-kept": self.beta,
            "starts-at-number": 0.0,
            "constant-in-gradient": 0.0,
            "constant-for-decay": 0.0,
            "decay-times": 1.0,
        }
        if "starts-at-weight" in ways:
            values = self.beta * self.step.weight + rest * added
        elif "starts-at-number" in ways:
            number = self.solve(self.actual - extra - rest * added, added * 0.0 + self.beta)
            values = self.beta * number + rest * added
        elif "other-share" in ways:
            number = self.solve(self.actual - extra - self.beta * self.old, added)
            if "square-of-mean" in ways and not self.step.before:
                number = (
                    number * math.nan
                )  # so it is of any first gradient, which the first mean is a share of
            values = self.beta * self.old + number * added
        elif "other-beta" in ways:
            number = self.solve(self.actual - extra - added, self.old - added)
            values = added + number * (self.old - added)
        elif "other-kept" in ways:
            number = self.solve(self.actual - extra - rest * added, self.old)
            values = number * self.old + rest * added
        elif "undecayed" in ways:
            values = self.old + rest * added
        elif "largest" in ways:
            values = (self.beta * self.old).maximum(added)
        else:
            values = self.beta * self.old + rest * added
        for way, found in {**{way: each[1] for way, each in self.constants.items()}, **self.times}.items():
            if way in ways:
                # With another number it would be told of neither which it is.
                number = found if number is None else number * math.nan
        return Made(values + extra, number, next((usual[way] for way in usual if way in ways), None))
