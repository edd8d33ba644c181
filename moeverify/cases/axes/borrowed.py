"""The ranks that ep and etp borrow from other axes, within one pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from moeverify.cases.rule import MODEL_OF_LAYOUT, Rule, blame, experts, own_model, reading
from moeverify.cases.schema import Case, Layout
from moeverify.errors import Problem


def lenders(layout: Layout) -> Mapping[str, int]:
    """Return the axes whose ranks hold experts, with their degrees.

    These are the axes within one replica. DDP shards nothing, so with DDP the replicas are borrowed too.
    """
    replicas = {"dp_replicate": layout.dp_replicate} if layout.data_parallel == "ddp" else {}
    return {**replicas, "dp_shard": layout.dp_shard, "cp": layout.cp, "tp": layout.tp}


def count_lent(layout: Layout) -> int:
    """Return the number of ranks that ep and etp regroup."""
    return math.prod(lenders(layout).values())


def count_holders(layout: Layout) -> int:
    """Return the number of ranks with a copy or shard of the same expert slice: the size of edp or efsdp."""
    return count_lent(layout) // (layout.ep * layout.expert_tp)


def has_experts(case: Case) -> bool:
    """Return whether the model is known to have experts."""
    return case.recipe.model.moe is not None


def needs_experts(degree: str) -> Rule:
    """Return the rule that a degree above 1 needs a model with experts."""

    @reading("layout.ep", "layout.etp", "layout.tp", *MODEL_OF_LAYOUT)
    def rule(case: Case) -> Iterator[Problem]:
        value = getattr(case.layout, degree) or 1
        if value > 1 and own_model(case) is not None and experts(case) is None:
            message = f"{degree} {value} needs a model with experts"
            yield blame(f"layout.{degree}", message, f"remove {degree}, or choose a preset with `moe`")

    return rule


@reading(
    *(f"layout.{name}" for name in ("ep", "etp", "tp", "cp", "data_parallel", "dp_replicate", "dp_shard"))
)
def borrowed_ranks(case: Case) -> Iterator[Problem]:
    """Expert parallelism adds no ranks: ep x etp must divide the number of borrowed ranks."""
    layout = case.layout
    num_lent = count_lent(layout)
    if num_lent % (layout.ep * layout.expert_tp) == 0:
        return
    product = " x ".join(f"{name} {value}" for name, value in lenders(layout).items())
    degrees = {"ep": layout.ep, "etp": layout.expert_tp}
    names = [name for name, value in degrees.items() if value > 1]
    wanted = " x ".join(f"{name} {degrees[name]}" for name in names)
    verb = "do" if len(names) > 1 else "does"
    message = f"{wanted} {verb} not divide the {num_lent} ranks that experts borrow ({product})"
    left = num_lent // math.gcd(num_lent, layout.expert_tp if "ep" in names else 1)
    remedy = f"write a divisor of {left}, or raise one of {', '.join(lenders(layout))}"
    yield blame(f"layout.{names[0]}", message, remedy)
