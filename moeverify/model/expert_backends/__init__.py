"""Implementations of the routed experts on a rank, one module for each value of `layout.experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moeverify.cases.choice import Implementation, Modules
from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case, Layout, MoE
from moeverify.errors import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from moeverify.model.expert_weights import ExpertWeights
    from moeverify.model.precision import Factory

    Multiply = Callable[[Tensor, Tensor, ExpertWeights], Tensor]
    """multiply(x (M, H) sorted by expert, counts (E) int64, weights) -> outputs (M, H).

    The counts may sum to less than M. Output rows after the counted ones are never read.
    """


class ExpertBackend(Implementation):
    """An implementation of the routed experts.

    A backend for the reference weights provides `multiply`; one with its own block provides `build_block`.
    """

    @property
    def multiply(self) -> Multiply | None:
        """Return the function that runs the experts on sorted tokens; None for a block of its own."""
        return None

    def check(self, dtype: torch.dtype, *, hidden: int, expert_hidden: int) -> None:
        """Check that weights of this dtype and these sizes can be multiplied.

        Raises: CaseError when they cannot.
        """

    def build_block(self, hidden: int, spec: MoE, *, factory: Factory) -> nn.Module | None:
        """Return a block with the interface of `moeverify.model.moe.MoELayer`, or None to use that class.

        Raises: CaseError when the block does not support the dtype, or its package is not installed.
        """
        return None


EXPERTS: Modules[ExpertBackend] = Modules("layout.experts", __name__)


@reading("layout.experts", "recipe.model")
def experts_of_the_reference(case: Case) -> Iterator[Problem]:
    """Reject the option for a user's model, which computes its experts with its own code."""
    is_chosen = case.layout.experts != Layout.model_fields["experts"].default
    if is_chosen and case.recipe.model.reference is None:
        message = f"experts `{case.layout.experts}` has no effect on a model with a `factory`"
        yield blame("layout.experts", message, "remove it; the factory chooses how experts are computed")


EXPERT_RULES = (experts_of_the_reference,)
