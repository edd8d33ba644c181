"""The random state is restored after each initialization, so all shards and layers draw the same numbers."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause
from moeverify.results.place import Stage


def inject(patch: Patch) -> None:
    """Let every tensor and every shard draw from the start of one stream."""
    from torch import Tensor

    from moeverify.faults.catalogue.initialization.streams import fill_run
    from moeverify.model.init import draw
    from moeverify.train.assemble import fill_one

    @patch.wrap(draw)
    def draw_without_name(original: Original[Tensor], seed: int, name: str, flat_index: Tensor) -> Tensor:
        return original(seed, "", flat_index)

    patch.replace(fill_one)(fill_run)


FAULT = Fault(
    number="F04",
    title="shards and layers of one shape start as copies",
    source="pytorch/torchtitan #3106",
    mechanism="each random operation on a DTensor forks and restores the CPU's random state, so all begin alike",
    trigger="FSDP2 with parameters on the CPU",
    case=make_case("f04", preset="tiny-gpt", dp_shard=2),
    expected=Expected(where=(At(stage=Stage.INITIALIZATION),), causes=(Cause.DUPLICATE,)),
    inject=inject,
    is_moe=False,
    notes="every parameter is at fault, so every place is right",
)
