"""The hook that moves the selection bias is never registered."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Leave the bias unchanged, whatever the counts."""
    from moeverify.train.routing import move_bias

    patch.replace(move_bias)(lambda bias, counts, rate: None)


FAULT = Fault(
    number="D05",
    title="the selection bias never moves",
    source="pytorch/torchtitan PR #3666 (8e5554449)",
    mechanism="the rate is set and the load-balancing hook is not registered for this model",
    trigger="any layout with loss-free balancing",
    case=make_case("d05", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="*.selection_bias"),), causes=(Cause.STALE, Cause.STATE)),
    inject=inject,
    notes="a bias that stays at its value is a state that moved by 0: both names are right",
)
