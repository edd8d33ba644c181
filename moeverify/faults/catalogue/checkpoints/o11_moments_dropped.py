"""Moments are loaded into an optimizer without state."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Load into a fresh optimizer, and ignore the state that it has no tensors for."""
    from moeverify.tools.checkpoint.load import refuse
    from moeverify.train.state import TrainingState

    patch.replace(TrainingState.materialize)(lambda self: None)
    patch.replace(refuse)(lambda folder, superfluous: None)


FAULT = Fault(
    number="O11",
    title="moments are silently dropped",
    source="areal-project/AReaL PR #1468",
    mechanism=(
        "the optimizer has no state yet when its state is loaded: there is no place to load into, and "
        "nobody asks"
    ),
    trigger="a load into a fresh optimizer",
    saver=make_saved_case("o11", dp_shard=2),
    case=make_saved_case("o11", dp_shard=2),
    expected=Expected(where=(At(name="optimizer/*"),), causes=(Cause.NOT_LOADED,)),
    inject=inject,
    is_moe=False,
)
