"""Adam's moments and weight change as formulas whose parts have named alternatives.

An alternative ("way") replaces one part of a formula, as another implementation or a mistake does.
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
"""Ways that the coefficients of a moment's terms already show when no other part differs."""


_CLEARLY = 1.01
"""Ratio of computed to actual step from which an element counts as limited by the bound."""


def round_to_bfloat16(value: float) -> float:
    """Round to 8 significant bits, the precision of bfloat16."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256.0) / 256.0, exponent)


def list_corrections(spec: Optimizer, number: int) -> Mapping[StepChange, tuple[float, float]]:
    """Return the bias corrections (first, second) that differ from the right ones, by way.

    The moments are divided by them. `number` counts steps from 1.
    """
    right = _correct(spec.betas, number)
    return {name: way for name, way in _list_ways(spec, number).items() if way != right}


def list_correction_factors(spec: Optimizer, number: int) -> Mapping[StepChange, float]:
    """Return the factor by which each way of bias correction scales the step, neglecting epsilon.

    `number` counts steps from 1. The factor is 1 where a way equals the right correction at this step.
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
    """Adam's weight change as a formula of its moments; `decays_weight` is true for AdamW."""

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
        """Return the parts of the formula and their ways."""
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
        """Return the weight change (N,) by the formula with these ways."""
        first, second = self._correct(ways)
        mean, under = self._list_mean(ways, first) / first, self._list_square(ways) / second
        root = under.sqrt() if "no-root" not in ways else under
        root = under**0.25 if "fourth-root" in ways else root
        number = None
        if "other-epsilon" in ways:
            # change = -lr * mean / (root + eps) + decay, solved for eps; least squares weights elements by
            # change.
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
        # A separate weight decay multiplies and rounds the weight before the step.
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
            # bfloat16 can round a beta to 1. The correction is then zero and the way has no value.
            "epsilon-before-correction": root + (eps / second**0.5 if second else math.nan),
            "epsilon-in-root": (under + eps).sqrt(),
            "epsilon-squared-in-root": (under + eps * eps).sqrt(),
            "epsilon-as-floor": root.clamp(min=eps),
            "no-epsilon": root,
        }
        return pick(known, ways, root + eps)

    def _shape(self, ways: Collection[str], direction: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the direction (N,) after its way, and the bound (N,) if the way solves for one."""
        if "sign-of-step" in ways:
            return direction.sign(), None
        if "masked-by-gradient" in ways:
            return direction * (direction * self.step.gradient > 0.0), None
        if "bounded-step" in ways and self.step.lr and "other-epsilon" not in ways:
            # An element counts as bounded where it moved clearly less than the formula says.
            taken = (self.actual - self._decay_by(ways, self.actual)) / -self.step.lr
            beyond = direction.abs() > taken.abs() * _CLEARLY
            bound = self.solve(taken.abs() * beyond, beyond.to(direction.dtype))
            # NaN unless some elements moved and lie within the bound.
            inside = ((taken != 0.0) & ~beyond).to(direction.dtype)
            bound = bound * self.solve(inside, inside)
            return direction.minimum(bound).maximum(-bound), bound
        return direction, None

    def _decay_by(self, ways: Collection[str], moved: Tensor) -> Tensor:
        """Return the weight decay's share of the change (N,); `moved` (N,) is the rest of the change."""
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
    """Return the wrong terms (N,) that a moment may accumulate instead of the gradient, by way.

    `limit` is the maximal gradient norm, None without clipping. Clipping precedes the optimizer, so with
    `decays` the weight decay is added to the clipped gradient.
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
    """An Adam moment as a weighted sum of its previous value and the term that a step adds."""

    def __init__(
        self, spec: Optimizer, step: StepValues, name: str, actual: Tensor, solve: Solve, *, decays: bool
    ) -> None:
        """Prepare the formula of moment `name`; `decays`: the gradient includes weight decay (Adam)."""
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
        """Return the multiple of the decay in the gradient, solved from the mean; empty without decay."""
        step, beta = self.step, self.betas[0]
        if not self.decays or not step.weight_decay:
            return {}
        taken = (step.after[MEAN] - beta * step.before.get(MEAN, step.gradient * 0.0)) / (1.0 - beta)
        return {"decay-times": self.solve(taken - step.gradient, step.weight_decay * step.weight)}

    def _find_constants(self, right: Tensor) -> Mapping[StepChange, tuple[Tensor, Tensor]]:
        """Return (base, added constant) by way; both moments use the constant solved from the mean."""
        step, beta = self.step, self.betas[0]
        bases: dict[StepChange, Tensor] = {"constant-in-gradient": right}
        if self.decays and step.weight_decay:
            bases["constant-for-decay"] = step.gradient
        taken = (step.after[MEAN] - beta * step.before.get(MEAN, right * 0.0)) / (1.0 - beta)
        ones, found = right * 0.0 + 1.0, {}
        for way, base in bases.items():
            number = self.solve(taken - base, ones)
            # Solve again for the residual: the first solution has the rounding error of a sum over many
            # elements.
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
        """Return the parts of the formula and their ways."""
        parts: dict[str, list[StepChange]] = {"added": list(self.added), "sum": ["other-share", "largest"]}
        if self.step.before:
            parts["sum"] += ["other-beta", "other-kept", "undecayed"]
        else:
            parts["start"] = ["starts-at-weight", "starts-at-number"]
        if self.is_square:
            parts["epsilon"] = ["epsilon-in-moment"]
        return Grammar(parts, self.make, KNOWN_ALONE)

    def make(self, ways: Collection[str]) -> Made:
        """Return the moment (N,) by the formula with these ways."""
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
                )  # any gradient of a first step fits this way: its mean is a multiple of its gradient
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
                # With two unknown numbers, the values cannot tell which of them differs.
                number = found if number is None else number * math.nan
        return Made(values + extra, number, next((usual[way] for way in usual if way in ways), None))
