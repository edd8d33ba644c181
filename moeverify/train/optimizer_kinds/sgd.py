"""Stochastic gradient descent, with momentum if it is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeverify.case.schema import Optimizer
from moeverify.train.optimizer_kinds import OptimizerKind
from moeverify.train.recomputation import WEIGHT, Recomputed, StepValues, Term

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer


class _Sgd(OptimizerKind):
    uses = frozenset({"momentum"})
    moments = ("momentum_buffer",)

    def build(
        self, groups: Sequence[dict[str, Any]], spec: Optimizer, kernels: Mapping[str, bool]
    ) -> TorchOptimizer:
        from torch.optim import SGD

        return SGD(groups, lr=spec.lr, momentum=spec.momentum, **kernels)

    def list_decays(self, spec: Optimizer) -> Mapping[str, float]:
        return {self.moments[0]: spec.momentum}

    def recompute(self, spec: Optimizer, step: StepValues) -> Sequence[Recomputed]:
        """Return the momentum, where there is one, and the change of the weight; see `OptimizerKind`.

        The first step takes the gradient itself for its momentum, as torch does (no dampening).
        """
        decay = step.weight_decay
        # The decay also where the options have none: one that is there all the same is then measured.
        direction = [Term("gradient", 1.0, step.gradient), Term("weight decay", decay, step.weight)]
        # The clip rounds its coefficient and the product; a decay its rate, a product and a sum.
        rounded = 2.0 * step.gradient.abs()
        if decay:
            rounded = rounded + step.gradient.abs() + 3.0 * decay * step.weight.abs()
        found = []
        momentum = self.moments[0]
        if momentum in step.after:
            terms = list(direction)
            if momentum in step.before:
                terms.insert(0, Term("momentum", spec.momentum, step.before[momentum]))
                # The option, and the product with it.
                rounded = rounded + 2.0 * spec.momentum * step.before[momentum].abs()
            found.append(Recomputed(momentum, terms, rounded))
            direction = [Term("momentum", 1.0, step.after[momentum])]
            rounded = rounded * 0.0
        elif spec.momentum:
            return []
        moved = [Term(term.name, -step.lr * term.coefficient, term.values) for term in direction]
        # The rate, and the product with it.
        size = sum((abs(term.coefficient) * term.values.abs() for term in moved), rounded * 0.0)
        return [*found, Recomputed(WEIGHT, moved, step.lr * rounded + 2.0 * size)]


IMPLEMENTATION = _Sgd()
