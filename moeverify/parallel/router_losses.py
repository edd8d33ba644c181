"""Source of the routers' balance and z losses: the training loop, or the package of the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeverify.cases.choice import Row, Table
from moeverify.cases.rule import blame, experts, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.model.transformer import Transformer

Collect = Callable[[], "tuple[Tensor, Tensor]"]
"""Returns this rank's part of the balance and the z loss, () each, of the last forward pass."""


@reading(
    "layout.router_losses", "layout.experts", "layout.recompute", "recipe.data.min_valid", "recipe.model.moe"
)
def losses_of_a_list(case: Case) -> Iterator[Problem]:
    """Megablocks' own losses are means over the tokens of a rank, kept in a process-wide list."""
    layout, path = case.layout, "layout.router_losses"
    if experts(case) is None:
        return
    if layout.experts != "megablocks":
        yield blame(path, "megablocks' own losses need its experts", "write `experts: megablocks`")
    if layout.recompute:
        yield blame("layout.recompute", "megablocks counts its losses again in a recomputation", "remove one")
    if case.recipe.data.min_valid < 1.0:
        message = "megablocks' own losses count padding too"
        yield blame(path, message, "set recipe.data.min_valid to 1.0")


def _collect_of_megablocks(model: Transformer, num_shares: int) -> Collect | None:
    if model.spec.moe is None:
        return None
    from moeverify.model.megablocks.losses import OwnLosses  # an optional package

    own = OwnLosses(model, model.spec.moe)

    def collect() -> tuple[Tensor, Tensor]:
        balance, z = own.collect()  # means over the tokens of this rank and micro-batch, () both
        return balance / num_shares, z / num_shares

    return collect


@dataclass(frozen=True, kw_only=True)
class RouterLossesKind(Row):
    """An option of `layout.router_losses`.

    `collect` takes the model and the number of micro-batches, over all ranks, that a mean is taken over. It
    returns a function that reads the losses of the experts' package, or None if the training loop computes
    them.
    """

    collect: Callable[[Transformer, int], Collect | None] = lambda model, num_shares: None


ROUTER_LOSSES: Table[RouterLossesKind] = Table(
    path="layout.router_losses",
    home=__name__,
    rows={
        "global": RouterLossesKind(meaning="Those of the global batch, whatever the layout."),
        "megablocks": RouterLossesKind(
            meaning="Those of the package: means over the tokens of one rank and micro-batch.",
            rules=(losses_of_a_list,),
            collect=_collect_of_megablocks,
        ),
    },
)
