"""Runs of a few ranks as the comparison sees them: a golden in memory, and pieces that each rank shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from moeverify.case.schema import Tolerance
from moeverify.compare.bounds import Bounds
from moeverify.compare.comparison import Comparison, Entry
from moeverify.compare.judging import Assembled, Judgement, Key, assemble, judge
from moeverify.layout.region import Region


@dataclass
class Golden:
    """Whole logical tensors by (step, kind, name)."""

    tensors: dict[Key, Tensor]

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        whole = self.tensors.get((step, kind, name))
        return None if whole is None else region.take(whole)


@dataclass
class Ranks:
    """What the ranks of a run show, judged against a golden. `axes` are the coordinates of each rank."""

    golden: Golden
    axes: Mapping[int, Mapping[str, int]]
    tolerance: Tolerance = field(default_factory=Tolerance)
    noise: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comparisons = [Comparison(self.golden) for _ in self.axes]

    def show(
        self,
        rank: int,
        local: Tensor | None,
        region: Region,
        name: str = "w",
        kind: str = "gradient",
        step: int = 0,
    ) -> None:
        self.comparisons[rank].observe(step, kind, name, local, region)

    def assemble(self) -> dict[Key, Assembled]:
        entries: list[list[Entry]] = [list(comparison.entries()) for comparison in self.comparisons]
        return assemble(entries)

    def judge(self) -> Judgement:
        return judge(self.assemble(), Bounds(self.tolerance, "float64", self.noise), self.axes)


@pytest.fixture
def weight() -> Tensor:
    """Return a logical tensor (8, 6) without repeated values."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, dtype=torch.float64, generator=generator)


@pytest.fixture
def run_ranks(weight: Tensor) -> Callable[..., Ranks]:
    """Return a function that makes a run of ranks with the given coordinates; the golden has `weight` as `w`."""

    def do(
        axes: Mapping[int, Mapping[str, int]], golden: Mapping[Key, Tensor] | None = None, **options
    ) -> Ranks:
        tensors = {(0, "gradient", "w"): weight} if golden is None else dict(golden)
        return Ranks(Golden(tensors), axes, **options)

    return do
