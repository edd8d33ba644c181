"""Parts of the model that ranks drew alike, and integers that a factor may be, from recorded lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeverify.parallel.regions.observer import INITIAL
from moeverify.parallel.regions.region import Region
from moeverify.results.finding import Finding
from moeverify.results.script import CopyFacts, ScriptCheck
from moeverify.scripts.compare.copies import find_copies
from moeverify.scripts.compare.explain import MICRO_BATCHES, RANKS, list_sources
from moeverify.scripts.compare.places import Placed, Places
from moeverify.scripts.compare.sites import add_sites
from moeverify.scripts.record.lines import Rows, ShardRegion, Span, Values
from moeverify.train.calls.call import LoopCall

WHOLE = Region.whole((4, 2))
HALVES = [Region.box((4, 2), [range(start, start + 2), range(2)]) for start in (0, 2)]


def make_run(*ranks: dict[str, int], shape: tuple[int, int] = (4, 2)) -> Any:
    """Return a run whose ranks drew these initial values, given by their hashes."""
    where = ShardRegion(shape=shape, dims=tuple(Span(start=0, stop=size) for size in shape))
    found = [
        SimpleNamespace(
            rank=number,
            drawn=[],
            values={
                (INITIAL, "initial_weight", name): Values(
                    step=INITIAL, kind="initial_weight", name=name, where=where, own=own, site="model.py:3"
                )
                for name, own in names.items()
            },
        )
        for number, names in enumerate(ranks)
    ]
    return SimpleNamespace(ranks=found)


def find(expected: Any, actual: Any, places: Places) -> list[tuple[str, tuple[str, ...]]]:
    facts = [finding.facts for finding in find_copies(expected, actual, places)]
    return [(each.kind, each.names) for each in facts if isinstance(each, CopyFacts)]


def place(*regions: Region) -> Places:
    return Places({(rank, "up"): Placed("up", region) for rank, region in enumerate(regions)})


@pytest.mark.parametrize("other", [{}, {"embed": 8}])
def test_shards_that_ranks_drew_alike_are_found(other: dict[str, int]) -> None:
    one = make_run({"up": 5})
    many = make_run({"up": 7}, {"up": 7, **other}, shape=(2, 2))
    assert find(one, many, place(*HALVES)) == [("shards", ("up",))]
    assert not find(one, many, place(WHOLE, WHOLE))  # replicas
    assert not find(one, make_run({"up": 7}, {"up": 6}, shape=(2, 2)), place(*HALVES))
    assert not find(one, make_run({"up": 0}, {"up": 0}, shape=(2, 2)), place(*HALVES))  # constants


def test_layers_of_stages_that_drew_alike_are_found_unless_one_device_has_equal_layers() -> None:
    stages = make_run({"layers.0.up": 7}, {"layers.1.up": 7})
    one = make_run({"layers.0.up": 7, "layers.1.up": 6})
    assert find(one, stages, Places()) == [("siblings", ("layers.1.up",))]
    assert not find(make_run({"layers.0.up": 7, "layers.1.up": 7}), stages, Places())


class Gradients:
    """A comparer of two ranks with so many backward passes and so much too large gradients in each step."""

    def __init__(self, places: Places, numbers: dict[int, int], factors: dict[int, float]) -> None:
        self.places, self.factors = places, factors
        calls = [
            LoopCall(step=step, name="backward") for step, number in numbers.items() for _ in range(number)
        ]
        values = {(step, "gradient", "up"): SimpleNamespace(step=step) for step in numbers}
        ranks = [SimpleNamespace(rank=rank, calls=calls, values=values) for rank in (0, 1)]
        self.actual = self.expected = SimpleNamespace(ranks=ranks, world_size=2, steps=list(numbers))

    def read_expected(self, step: int, kind: str, name: str) -> torch.Tensor:
        return torch.ones(4, 2)

    def read_actual(self, rank: object, line: Any) -> torch.Tensor:
        return torch.full((4, 2), self.factors[line.step])


@pytest.mark.parametrize(
    ("regions", "numbers", "factors", "names"),
    [
        ((WHOLE, WHOLE), {0: 2, 1: 2}, {0: 2.0, 1: 2.0}, [RANKS, MICRO_BATCHES]),
        ((WHOLE, WHOLE), {0: 2, 1: 1}, {0: 2.0, 1: 1.02}, [MICRO_BATCHES]),
        ((WHOLE, WHOLE), {0: 2, 1: 1}, {0: 2.0, 1: 1.98}, [RANKS]),
        ((WHOLE, WHOLE), {0: 2, 1: 1}, {0: 2.0, 1: 1.4}, [RANKS, MICRO_BATCHES]),
        ((WHOLE,), {0: 2}, {0: 2.0}, [MICRO_BATCHES]),  # each tensor is on one rank: a pipeline
        (tuple(HALVES), {0: 2}, {0: 2.0}, [RANKS, MICRO_BATCHES]),  # gradients of shards are averaged
    ],
)
def test_a_number_that_the_run_rules_out_is_no_source(
    regions: tuple[Region, ...], numbers: dict[int, int], factors: dict[int, float], names: list[str]
) -> None:
    comparer: Any = Gradients(place(*regions), numbers, factors)
    assert [source.name for source in list_sources(comparer, 0)] == names


def test_a_finding_has_the_lines_of_its_rank() -> None:
    run = make_run({"up": 5})
    calls = [
        LoopCall(step=1, name=name, site=f"train.py:{n}")
        for n, name in enumerate(("backward", "optimizer step"))
    ]
    run.ranks[0].calls = calls
    run.ranks[0].rows = [Rows(step=1, name="0", shape=(1, 2), rows=(1,), site="data.py:9")]
    for check, tensor, sites in (
        ("gradient", "up", ["train.py:0", "model.py:3"]),
        ("optimizer state", "up.exp_avg", ["train.py:1", "model.py:3"]),
        (ScriptCheck.BATCH, "input 0", ["data.py:9"]),
    ):
        finding = Finding(check=check, tensor=tensor, step=1, rank=0, error=1.0, bound=0.0)
        assert [each.site for each in add_sites(run, finding).sites] == sites
    assert not add_sites(run, finding.model_copy(update={"follows": "up"})).sites
