"""SGD's momentum and weight change as formulas whose parts have named alternatives (see `adam_grammar`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from moeverify.case.schema import Optimizer
from moeverify.results.step_facts import StepChange
from moeverify.train.adam_grammar import KNOWN_ALONE, list_added
from moeverify.train.recomputation import StepValues
from moeverify.train.step_grammar import Grammar, Made, Solve, pick

if TYPE_CHECKING:
    from torch import Tensor

MOMENTUM = "momentum_buffer"


class SgdStep:
    """SGD's weight change as a formula of the new momentum, or of the gradient without momentum."""

    def __init__(self, spec: Optimizer, step: StepValues) -> None:
        self.spec, self.step = spec, step
        self.gradient = step.gradient + step.weight_decay * step.weight

    def grammar(self) -> Grammar:
        """Return the parts of the formula and their ways."""
        parts: dict[str, list[StepChange]] = {
            "shape": ["sign-of-step"],
            "rate": ["step-without-rate", "step-by-squared-rate"],
        }
        if MOMENTUM in self.step.after:
            parts["direction"] = ["nesterov", "gradient-for-mean", "old-mean"]
        if self.step.weight_decay:
            parts["decay"] = ["decay-at-weight", "decay-without-rate"]
        return Grammar(parts, self.make)

    def make(self, ways: Collection[str]) -> Made:
        """Return the weight change (N,) by the formula with these ways."""
        step, rate = self.step, self.step.lr
        momentum = step.after.get(MOMENTUM, self.gradient)
        known = {
            "nesterov": self.gradient + self.spec.momentum * momentum,
            "gradient-for-mean": self.gradient,
            "old-mean": step.before.get(MOMENTUM, 0.0 * momentum),
        }
        direction = pick(known, ways, momentum)
        if "sign-of-step" in ways:
            direction = direction.sign()
        decayed = step.weight * 0.0
        if "decay-at-weight" in ways:
            decayed = -rate * step.weight_decay * step.weight
        elif "decay-without-rate" in ways:
            decayed = -step.weight_decay * step.weight
        power = 0 if "step-without-rate" in ways else 2 if "step-by-squared-rate" in ways else 1
        return Made(decayed - rate**power * direction)


class SgdMomentum:
    """The momentum as a weighted sum of its previous value and the term that a step adds."""

    def __init__(self, spec: Optimizer, step: StepValues, actual: Tensor, solve: Solve) -> None:
        self.step, self.actual, self.solve = step, actual, solve
        self.momentum = spec.momentum
        self.old = step.before.get(MOMENTUM, step.gradient * 0.0)
        self.right = step.gradient + step.weight_decay * step.weight
        added = list_added(step, spec.clip_norm, decays=True)
        self.added = {**added, "no-decay-in-gradient": step.gradient}
        self.added.pop("decay-in-gradient", None)
        if not step.weight_decay:
            del self.added["no-decay-in-gradient"]

    def grammar(self) -> Grammar:
        """Return the parts of the formula and their ways."""
        parts: dict[str, list[StepChange]] = {"added": list(self.added), "sum": ["other-share"]}
        if self.step.before:
            parts["sum"] += ["other-beta", "other-kept"]
        elif self.momentum:
            parts["start"] = ["starts-twice", "starts-dampened"]
        return Grammar(parts, self.make, KNOWN_ALONE)

    def make(self, ways: Collection[str]) -> Made:
        """Return the momentum (N,) by the formula with these ways."""
        added = pick(self.added, ways, self.right)
        if "starts-twice" in ways:
            return Made((self.momentum + 1.0) * added)
        if "starts-dampened" in ways:
            return Made((1.0 - self.momentum) * added)
        if "other-share" in ways:
            number = self.solve(self.actual - self.momentum * self.old, added)
            return Made(self.momentum * self.old + number * added, number, 1.0)
        if "other-beta" in ways:  # a weighted average of gradients
            number = self.solve(self.actual - added, self.old - added)
            return Made(added + number * (self.old - added), number)
        if "other-kept" in ways:
            number = self.solve(self.actual - added, self.old)
            return Made(number * self.old + added, number, self.momentum)
        return Made(self.momentum * self.old + added)
