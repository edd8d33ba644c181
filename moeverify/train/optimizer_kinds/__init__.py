"""The kinds of optimizers, each a file here, called as `recipe.optimizer.name` calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moeverify.case.choice import Implementation, Modules, Row, Table, list_options
from moeverify.case.rule import Rule, blame, reading
from moeverify.case.schema import Case, Optimizer
from moeverify.errors import Problem
from moeverify.train.recomputation import Recomputed, StepValues

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer


class OptimizerKind(Implementation):
    """One kind of optimizer; `uses` are the fields of `recipe.optimizer` that not every kind has.

    `moments` are the names of what it keeps of each parameter, in the parameter's shape. `decays_weight` is true
    where weight decay is taken off the weight, and false where it is added to the gradient.
    """

    uses: frozenset[str] = frozenset()
    moments: tuple[str, ...] = ()
    decays_weight: bool = False

    def build(
        self, groups: Sequence[dict[str, Any]], spec: Optimizer, kernels: Mapping[str, bool]
    ) -> TorchOptimizer:
        """Return torch's optimizer over parameter groups, computed by `kernels` (its `foreach` and `fused`)."""
        raise NotImplementedError

    def list_decays(self, spec: Optimizer) -> Mapping[str, float]:
        """Return by moment the factor that its value of the step before has in a step's sum."""
        raise NotImplementedError

    def recompute(self, spec: Optimizer, step: StepValues) -> Sequence[Recomputed]:
        """Return what a step makes of these values: the moments, and the change of the weight by its own moments.

        The change is that of the moments which the optimizer has made, so an error of a moment is not seen twice.
        """
        raise NotImplementedError


OPTIMIZER: Modules[OptimizerKind] = Modules("recipe.optimizer.name", __name__)


@dataclass(frozen=True, kw_only=True)
class Kernels(Row):
    """How the arithmetic of an optimizer is done, as keywords of torch's optimizers."""

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
    """Return the rule that the optimizer's field `name` is set for those kinds only that use it."""

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
