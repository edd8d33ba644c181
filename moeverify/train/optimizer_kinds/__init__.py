"""The kinds of optimizers, one module for each value of `recipe.optimizer.name`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moeverify.cases.choice import Implementation, Modules, Row, Table, list_options
from moeverify.cases.rule import Rule, blame, reading
from moeverify.cases.schema import Case, Optimizer
from moeverify.errors import Problem
from moeverify.train.recomputation import Recomputed, StepValues

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer


class OptimizerKind(Implementation):
    """A kind of optimizer; `uses` are the fields of `recipe.optimizer` that only some kinds have.

    `moments` are the names of its state tensors in the parameter's shape. `decays_weight` is true if weight
    decay shrinks the weight, and false if it is added to the gradient.
    """

    uses: frozenset[str] = frozenset()
    moments: tuple[str, ...] = ()
    decays_weight: bool = False

    def build(
        self, groups: Sequence[dict[str, Any]], spec: Optimizer, kernels: Mapping[str, bool]
    ) -> TorchOptimizer:
        """Return torch's optimizer over parameter groups; `kernels` are its `foreach` and `fused`."""
        raise NotImplementedError

    def list_decays(self, spec: Optimizer) -> Mapping[str, float]:
        """Return, by moment, the factor of its previous value in a step's sum."""
        raise NotImplementedError

    def recompute(self, spec: Optimizer, step: StepValues) -> Sequence[Recomputed]:
        """Return the expected moments and weight change of a step.

        The weight change uses the optimizer's own new moments, so an error in a moment is reported only
        once.
        """
        raise NotImplementedError


OPTIMIZER: Modules[OptimizerKind] = Modules("recipe.optimizer.name", __name__)


@dataclass(frozen=True, kw_only=True)
class Kernels(Row):
    """An implementation of an optimizer's arithmetic, as keyword arguments of torch's optimizers."""

    keywords: Mapping[str, bool] = field(default_factory=dict)


OPTIMIZER_KERNELS: Table[Kernels] = Table(
    path="layout.optimizer",
    home=__name__,
    rows={
        "foreach": Kernels(meaning="One kernel for many tensors.", keywords={"foreach": True}),
        "fused": Kernels(meaning="One kernel for the whole update.", keywords={"fused": True}),
        "loop": Kernels(
            meaning="Tensor by tensor, operation by operation.", keywords={"foreach": False, "fused": False}
        ),
    },
)


def _only_for_users(name: str) -> Rule:
    """Return the rule that field `name` of the optimizer is set only for kinds that use it."""

    @reading(f"recipe.optimizer.{name}", "recipe.optimizer.name")
    def rule(case: Case) -> Iterator[Problem]:
        optimizer, default = case.recipe.optimizer, getattr(Optimizer(), name)
        if name in OPTIMIZER.find(optimizer.name).uses or getattr(optimizer, name) == default:
            return
        message = f"`{name}` has no effect on the optimizer `{optimizer.name}`"
        written = list(default) if isinstance(default, tuple) else default
        known = [option for option in list_options(OPTIMIZER.path) if OPTIMIZER.has(option)]
        users = " or ".join(option for option in known if name in OPTIMIZER.find(option).uses)
        remedy = f"remove it (or write the default {written} over a base), or use {users}"
        yield blame(f"recipe.optimizer.{name}", message, remedy)

    return rule


OPTIMIZER_RULES = tuple(_only_for_users(name) for name in ("momentum", "betas", "eps"))
