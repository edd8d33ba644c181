"""The state of the experts' optimizer is never loaded."""

from __future__ import annotations

from moeverify.faults.catalogue.checkpoints.unloaded import load_into_copies
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Patch
from moeverify.faults.setting import make_saved_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Load the moments of experts into tensors that do not belong to the optimizer."""
    load_into_copies(
        patch, lambda number, part: part.key.startswith("optimizer/") and ".experts." in part.key
    )


FAULT = Fault(
    number="O01",
    title="the moments of experts are not loaded",
    source="NVIDIA/Megatron-LM issue #761 (1505db4c)",
    mechanism=(
        "of the two optimizers, dense and expert, the second is given what the first has read: its "
        "own state never arrives"
    ),
    trigger="expert parallelism, which has two optimizers",
    saver=make_saved_case("o01", dp_shard=2, ep=2),
    case=make_saved_case("o01", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="optimizer/*.moe.experts*"),), causes=(Cause.NOT_LOADED,)),
    inject=inject,
)
