"""Load of the experts, counted during training and summed over ranks at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeverify.cases.axes.groups import find_source
from moeverify.cases.schema import Case
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.results.load import ExpertLoad
from moeverify.train.program import TrainingProgram
from moeverify.train.rebalancing import count_copies
from moeverify.verification.checks.base import Watch

Copies = dict[tuple[int, int], Tensor]
"""Maps (step, layer) to the number of token copies of this rank for each expert, (E) int64."""


class LoadWatch(Watch[Copies]):
    """Watch that counts the experts chosen by this rank's routers, for each layer and step.

    Padding tokens are counted. It issues no collective during the run.
    """

    def __init__(self, program: TrainingProgram) -> None:
        self._routers = {router.name: router for router in program.routers}
        self._copies: Copies = {}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Count the expert choices of a router when its combine weights are shown; see `Watch`."""
        if kind != Kind.ROUTER_WEIGHTS or name not in self._routers:
            return
        for layer, counts in count_copies([self._routers[name]]):
            key = (step, layer)
            self._copies[key] = self._copies[key] + counts if key in self._copies else counts

    def close(self) -> None:
        """Release the model; see `Watch`."""
        self._routers = {}

    def report(self) -> Copies:
        """Return the counts of this rank."""
        return {key: counts.cpu() for key, counts in self._copies.items()}


def sum_load(case: Case, by_rank: Sequence[Copies]) -> ExpertLoad | None:
    """Return the load of a run from the counts of all ranks, or None for a model without visible routers."""
    moe = case.recipe.model.moe
    keys = {key for copies in by_rank for key in copies}
    if moe is None or not keys:
        return None
    layers = sorted({layer for _, layer in keys})
    num_steps = 1 + max(step for step, _ in keys)
    total = torch.zeros(num_steps, len(layers), moe.num_experts, case.layout.ep, dtype=torch.int64)
    for rank, copies in enumerate(by_rank):
        source = find_source(case.layout, rank)
        if source is None:
            continue
        for (step, layer), counts in copies.items():
            total[step, layers.index(layer), :, source] += counts
    return ExpertLoad(
        layers=tuple(layers),
        num_experts=moe.num_experts,
        num_sources=case.layout.ep,
        top_k=moe.top_k,
        copies=tuple(
            tuple(tuple(tuple(expert) for expert in layer) for layer in step) for step in total.tolist()
        ),
    )
