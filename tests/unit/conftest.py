"""Runs of a few ranks as the comparison sees them: a golden in memory, and each rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import Case, Tolerance
from moeverify.cases.validation.load import build_case
from moeverify.parallel.regions.region import Region
from moeverify.report.words.run import word_finding
from moeverify.verification.checks.base import Judgement, ShownTensors
from moeverify.verification.checks.bounds import Bounds
from moeverify.verification.checks.golden_tensors import CHECKS
from moeverify.verification.checks.registry import KIND_ORDER
from moeverify.verification.compare.assembled import Assembled, Key, assemble
from moeverify.verification.compare.comparison import ComparedShard, Comparison

Names = Mapping[int, set[tuple[str, str]]]
CASE: Case = build_case({"name": "hand", "recipe": {"model": {"preset": "tiny-gpt"}}, "layout": {}})


@dataclass
class Golden:
    """Whole logical tensors by (step, kind, name)."""

    tensors: dict[Key, Tensor]

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        whole = self.tensors.get((step, kind, name))
        return None if whole is None else region.take(whole)


@dataclass
class Ranks:
    """The shards of a run's ranks, judged against a golden. `axes` are the coordinates of each rank."""

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
        entries: list[list[ComparedShard]] = [list(comparison.entries()) for comparison in self.comparisons]
        return assemble(entries, KIND_ORDER)

    def shown(self, case: Case = CASE, golden_names: Names | None = None) -> ShownTensors:
        """Return the input of a check on rank 0."""
        bounds = Bounds(self.tolerance, "float64", self.noise)
        return ShownTensors(self.axes, self.assemble(), bounds, case=case, golden_names=golden_names or {})

    def judge(self) -> Judgement:
        """Return the results of the comparisons with the golden, with findings as text."""
        shown = self.shown()
        outcomes = [outcome for check in CHECKS if (outcome := check.judge(shown, ())) is not None]
        found = [word_finding(finding) for outcome in outcomes for finding in outcome.findings]
        return Judgement(tuple(outcome.result for outcome in outcomes), tuple(found))


@pytest.fixture
def weight() -> Tensor:
    """Return a logical tensor (8, 6) without repeated values."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, dtype=torch.float64, generator=generator)


@pytest.fixture
def run_ranks(weight: Tensor) -> Callable[..., Ranks]:
    """Return a function that makes a run of ranks with these coordinates; the golden's `w` is `weight`."""

    def do(
        axes: Mapping[int, Mapping[str, int]], golden: Mapping[Key, Tensor] | None = None, **options
    ) -> Ranks:
        tensors = {(0, "gradient", "w"): weight} if golden is None else dict(golden)
        return Ranks(Golden(tensors), axes, **options)

    return do
