"""Check that each layer is on the pipeline rank of its stage.

If two layers trade places, each stage still has the right number of layers and each layer is on one stage.
The model is wrong all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.axes.stages import split_layers, stages_of
from moeverify.cases.schema import Layout
from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import ShardingFacts
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import Shown


def find_elsewhere(shown: Shown) -> Iterator[Finding]:
    """Yield one finding for the layers that are on a wrong rank of some pipeline.

    Layers on no rank of a pipeline are reported by `coverage`. Layers on their own rank and on others are
    repeated, not misplaced.
    """
    model, layout = shown.case.recipe.model.reference, shown.case.layout
    if model is None or layout.pp == 1:
        return
    holders = _list_holders(shown, model.num_layers)
    wrong: dict[int, set[int]] = {}
    for group in MeshPlan.of(layout).dense.groups("pp"):
        for layer, right in enumerate(list_owners(layout, model.num_layers)):
            found = holders[layer].intersection(group)
            if found and group[right] not in found:
                wrong.setdefault(layer, set()).update(found)
    if wrong:
        ranks = tuple(sorted(set().union(*wrong.values())))
        yield Finding(
            check=CheckName.SHARDING,
            kind=Kind.INITIAL_WEIGHT,
            tensor="axis pp",
            step=INITIAL,
            rank=ranks[0],
            ranks=ranks,
            coordinates=shown.place(ranks[0]),
            error=1.0,
            bound=0.0,
            facts=ShardingFacts(axis="pp", modules=tuple(map(_name, sorted(wrong))), is_elsewhere=True),
        )


def list_owners(layout: Layout, num_layers: int) -> Sequence[int]:
    """Return for each layer the pp coordinate of the rank with its stage."""
    by_stage = {stage: rank for rank in range(layout.pp) for stage in stages_of(layout, rank)}
    sizes = map(len, split_layers(layout, num_layers))
    return [by_stage[stage] for stage, size in enumerate(sizes) for _ in range(size)]


def _list_holders(shown: Shown, num_layers: int) -> list[set[int]]:
    """Return for each layer the ranks whose initial state contains a part of it."""
    holders: list[set[int]] = [set() for _ in range(num_layers)]
    by_name = {_name(layer): ranks for layer, ranks in enumerate(holders)}
    for (step, kind, name), tensor in shown.tensors.items():
        ranks = by_name.get(".".join(name.split(".")[:2]))
        if ranks is not None and step == INITIAL and kind == Kind.INITIAL_WEIGHT:
            ranks.update(tensor.list_regions())
    return holders


def _name(layer: int) -> str:
    return f"layers.{layer}"
