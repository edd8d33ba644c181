"""How the experts of a rank are computed: each backend is a file here, called as `layout.experts` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moeverify.case.choice import Implementation, Modules
from moeverify.case.rule import blame, reading
from moeverify.case.schema import Case, Layout, MoE
from moeverify.errors import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from moeverify.model.expert_weights import ExpertWeights
    from moeverify.model.precision import Factory

    Multiply = Callable[[Tensor, Tensor, ExpertWeights], Tensor]
    """x (M, H) sorted by expert, counts (E) int64, the weights in; outputs (M, H) out.

    The counts may sum to less than M: what comes out for the rows after them is never read.
    """


class ExpertBackend(Implementation):
    """One way to compute the routed experts.

    A backend that is a function of our stacked weights gives `multiply`; one with a block of its own, `build_block`.
    """

    @property
    def multiply(self) -> Multiply | None:
        """Return the function that runs the experts on tokens sorted by expert, if the weights are ours."""
        return None

    def check(self, dtype: torch.dtype, *, hidden: int, expert_hidden: int) -> None:
        """Make sure that weights of this dtype and these sizes can be multiplied.

        Raises: CaseError.
        """

    def build_block(self, hidden: int, spec: MoE, *, factory: Factory) -> nn.Module | None:
        """Return a mixture-of-experts block called as `moeverify.model.moe.MoE` is, or None for that one.

        Raises: CaseError where the block cannot take the dtype, or its package is not installed.
        """
        return None


EXPERTS: Modules[ExpertBackend] = Modules("layout.experts", __name__)


@reading("layout.experts", "recipe.model")
def experts_of_the_reference(case: Case) -> Iterator[Problem]:
    """The experts of a model that moeverify did not write are computed by its own code."""
    is_chosen = case.layout.experts != Layout.model_fields["experts"].default
    if is_chosen and case.recipe.model.reference is None:
        message = f"experts `{case.layout.experts}` has no effect on a model with a `factory`"
        yield blame("layout.experts", message, "remove it; the factory chooses how experts are computed")


EXPERT_RULES = (experts_of_the_reference,)
