"""Adam: weight decay is added to the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeverify.case.rule import blame, reading
from moeverify.case.schema import Case, Optimizer
from moeverify.errors import Problem
from moeverify.train.optimizer_kinds import OptimizerKind

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer


@reading("recipe.optimizer.name", "recipe.optimizer.betas")
def forgetting(case: Case) -> Iterator[Problem]:
    """Adam divides by 1 - beta^step."""
    if max(case.recipe.optimizer.betas) >= 1.0:
        message = "a beta of 1 never forgets, and divides by zero"
        yield blame("recipe.optimizer.betas", message, "write numbers below 1")


class AdamKind(OptimizerKind):
    """Adam, or an optimizer of torch with the same arguments."""

    uses = frozenset({"betas", "eps"})
    rules = (forgetting,)

    def __init__(self, torch_class: str) -> None:
        self.torch_class = torch_class

    def build(
        self, groups: Sequence[dict[str, Any]], spec: Optimizer, kernels: Mapping[str, bool]
    ) -> TorchOptimizer:
        """Return torch's optimizer; see `OptimizerKind`."""
        from torch import optim

        make = getattr(optim, self.torch_class)
        built: TorchOptimizer = make(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, **kernels)
        return built


IMPLEMENTATION = AdamKind("Adam")
