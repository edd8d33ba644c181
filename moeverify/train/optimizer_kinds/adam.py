"""Adam: weight decay is added to the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case, Optimizer
from moeverify.errors import Problem
from moeverify.train.optimizer_kinds import OptimizerKind
from moeverify.train.recomputation import WEIGHT, Recomputed, StepValues, Term

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer


@reading("recipe.optimizer.name", "recipe.optimizer.betas")
def forgetting(case: Case) -> Iterator[Problem]:
    """Check that the betas are below 1: Adam divides by 1 - beta^step."""
    if max(case.recipe.optimizer.betas) >= 1.0:
        message = "a beta of 1 never forgets, and divides by zero"
        yield blame("recipe.optimizer.betas", message, "write numbers below 1")


class AdamKind(OptimizerKind):
    """Adam, or a torch optimizer with the same arguments."""

    uses = frozenset({"betas", "eps"})
    moments = ("exp_avg", "exp_avg_sq")
    rules = (forgetting,)

    def __init__(self, torch_class: str, *, decays_weight: bool) -> None:
        self.torch_class = torch_class
        self.decays_weight = decays_weight

    def build(
        self, groups: Sequence[dict[str, Any]], spec: Optimizer, kernels: Mapping[str, bool]
    ) -> TorchOptimizer:
        """Return torch's optimizer; see `OptimizerKind`."""
        from torch import optim

        make = getattr(optim, self.torch_class)
        built: TorchOptimizer = make(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, **kernels)
        return built

    def list_decays(self, spec: Optimizer) -> Mapping[str, float]:
        """Return both betas by moment; see `OptimizerKind`."""
        return dict(zip(self.moments, spec.betas, strict=True))

    def recompute(self, spec: Optimizer, step: StepValues) -> Sequence[Recomputed]:
        """Return both moments and the weight change; see `OptimizerKind`.

        Source: Kingma and Ba 2015, "Adam", algorithm 1; Loshchilov and Hutter 2019, algorithm 2 (decoupled
        decay).
        """
        beta1, beta2 = spec.betas
        rest1, rest2 = 1.0 - beta1, 1.0 - beta2
        decay = 0.0 if self.decays_weight else step.weight_decay
        gradient = step.gradient + decay * step.weight
        # The clip rounds its coefficient and a product. Decay in the gradient rounds the rate, a product
        # and a sum.
        size = 2.0 * step.gradient.abs()
        if decay:
            size = size + step.gradient.abs() + 3.0 * decay * step.weight.abs()
        zeros = gradient * 0.0
        mean, square = (step.before.get(name, zeros) for name in self.moments)
        found = []
        if "exp_avg" in step.after:
            terms = [Term("exp_avg", beta1, mean), Term("gradient", rest1, step.gradient)]
            if not self.decays_weight:
                terms.append(Term("weight decay", rest1 * decay, step.weight))
            # lerp rounds its weight, a difference (at most the sum of both magnitudes), and their product.
            lerp = 3.0 * rest1 * (mean.abs() + gradient.abs())
            # torch's fused CUDA kernel rounds beta to float32 and computes m = beta * m + (g - beta * g).
            options = beta1 * (mean.abs() + gradient.abs())
            found.append(Recomputed("exp_avg", terms, lerp + rest1 * size, options))
        if "exp_avg_sq" in step.after:
            terms = [Term("exp_avg_sq", beta2, square), Term("squared gradient", rest2, gradient * gradient)]
            # Roundings: the option and the decayed moment; the option, the square and their product.
            added = rest2 * gradient.abs() * (3.0 * gradient.abs() + 2.0 * size)
            options = beta2 * (square.abs() + gradient * gradient)
            # Where gradient and decay cancel, their sum is as small as its rounding error, and so is its
            # square.
            squared = rest2 * size * size if decay else 0.0
            rounded = 2.0 * beta2 * square.abs() + added
            found.append(Recomputed("exp_avg_sq", terms, rounded, options, squared=squared))
        if set(self.moments) <= set(step.after):
            found.append(self._recompute_weight(spec, step))
        return found

    def _recompute_weight(self, spec: Optimizer, step: StepValues) -> Recomputed:
        powers = [beta**step.number for beta in spec.betas]
        correction1, correction2 = (1.0 - power for power in powers)
        mean, square = (step.after[name] for name in self.moments)
        # A negative second moment gives NaN, which no bound allows.
        moved = (mean / correction1) / ((square / correction2).sqrt() + spec.eps)
        terms = [Term("step", -step.lr, moved)]
        # Roundings: the root, its correction and their quotient; epsilon and the sum; the quotient of the
        # moments; the rate and its product.
        rounded = 8.0 * step.lr * moved.abs()
        # The fused CUDA kernel takes powers of rounded betas: one rounding per step, and 8 for powf's own
        # error of 4 units in the last place. The correction of the second moment is under a root, which
        # halves its error.
        lost1, lost2 = ((step.number + 8.0) * power / (1.0 - power) for power in powers)
        options = (lost1 + 0.5 * lost2) * step.lr * moved.abs()
        if self.decays_weight:
            # Kept for a decay of 0: the fit then measures a decay that should not be there.
            terms.append(Term("weight decay", -step.lr * step.weight_decay, step.weight))
        smallest, shrunk_by = 4.0 + 4.0 * step.lr / spec.eps, None
        if self.decays_weight and step.weight_decay:
            shrunk_by = 1.0 - step.lr * step.weight_decay
        return Recomputed(WEIGHT, terms, rounded, options, smallest=smallest, shrunk_by=shrunk_by)


IMPLEMENTATION = AdamKind("Adam", decays_weight=False)
