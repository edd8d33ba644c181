"""Sizes of the token exchange over `ep`: the actual number of rows, or the maximum possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeverify.cases.axes.expert_placement import is_placed
from moeverify.cases.choice import Row, Table
from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem

if TYPE_CHECKING:
    from moeverify.parallel.expert import MakeDispatcher


@reading(
    *(
        f"layout.{name}"
        for name in ("dispatch", "ep", "experts", "placement", "exchange", "rebalance", "parallelize")
    )
)
def equal_blocks(case: Case) -> Iterator[Problem]:
    """Padded exchanges are for equal blocks of experts on the ranks of ep."""
    layout, path = case.layout, "layout.dispatch"
    if layout.parallelize is not None or layout.ep == 1:
        yield blame(path, "`padded` is a way to exchange tokens over ep", "remove it, or set ep")
    elif layout.experts == "megablocks":
        yield blame(path, "megablocks exchanges tokens by itself", "remove it, or write other `experts`")
    elif is_placed(layout):
        yield blame(
            path, "`padded` is for equal blocks of experts", "remove it, or placement, exchange and rebalance"
        )


@dataclass(frozen=True, kw_only=True)
class DispatchKind(Row):
    """One way to exchange tokens; `find_maker` returns the constructor of a layer's dispatcher."""

    find_maker: Callable[[], MakeDispatcher]


def _find_sized() -> MakeDispatcher:
    from moeverify.parallel.expert import make_sized

    return make_sized


def _find_padded() -> MakeDispatcher:
    from moeverify.parallel.padded_dispatcher import PaddedDispatcher

    return PaddedDispatcher


DISPATCH: Table[DispatchKind] = Table(
    path="layout.dispatch",
    home=__name__,
    rows={
        "sized": DispatchKind(
            meaning="As many rows as there are: the host waits for their number, once for each layer.",
            find_maker=_find_sized,
        ),
        "padded": DispatchKind(
            meaning="As many rows as there could be: the host waits for nothing, and buffers are larger.",
            rules=(equal_blocks,),
            find_maker=_find_padded,
        ),
    },
)
