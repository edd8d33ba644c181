"""Stochastic gradient descent, with momentum if it is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeverify.cases.schema import Optimizer
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
        """Return the momentum, if any, and the weight change; see `OptimizerKind`.

        In the first step the momentum is the gradient itself, as in torch (no dampening).
        """
        decay = step.weight_decay
        # The decay term is kept for a decay of 0: the fit then measures a decay that should not be there.
        direction = [Term("gradient", 1.0, step.gradient), Term("weight decay", decay, step.weight)]
        # The clip rounds its coefficient and a product. A decay rounds its rate, a product and a sum.
        rounded = 2.0 * step.gradient.abs()
        if decay:
            rounded = rounded + step.gradient.abs() + 3.0 * decay * step.weight.abs()
        found = []
        momentum = self.moments[0]
        if momentum in step.after:
            terms = list(direction)
            if momentum in step.before:
                terms.insert(0, Term("momentum", spec.momentum, step.before[momentum]))
                # Roundings: the option and its product.
                rounded = rounded + 2.0 * spec.momentum * step.before[momentum].abs()
            found.append(Recomputed(momentum, terms, rounded))
            direction = [Term("momentum", 1.0, step.after[momentum])]
            rounded = rounded * 0.0
        elif spec.momentum:
            return []
        moved = [Term(term.name, -step.lr * term.coefficient, term.values) for term in direction]
        # Roundings: the rate and its product.
        size = sum((abs(term.coefficient) * term.values.abs() for term in moved), rounded * 0.0)
        return [*found, Recomputed(WEIGHT, moved, step.lr * rounded + 2.0 * size)]


IMPLEMENTATION = _Sgd()
