"""The optimizer of the experts never gets its state back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeverify.checkpoint import load
from moeverify.checkpoint.writer import Part
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.setting import make_saved_case
from moeverify.layout.local_shard import LocalShard
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject() -> None:
    """Read the moments of experts into tensors that no optimizer has."""

    def list_parts(tensors: Sequence[LocalShard]) -> tuple[list[Part], dict[str, Tensor]]:
        parts, state = original(tensors)
        for number, part in enumerate(parts):
            if part.key.startswith("optimizer/") and ".experts." in part.key:
                state[str(number)] = state[str(number)].clone()
        return parts, state

    original = load.list_parts
    load.list_parts = list_parts


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
