"""The checks after a load, on handmade tensors: bits, experts, and the steps that follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import build_case
from moeverify.parallel.regions.region import Region
from moeverify.report.words.run import word_finding
from moeverify.results.facts import BitFacts, ExpertFacts
from moeverify.verification.checks.base import RankLoad
from moeverify.verification.checks.experts import ExpertHashes, hash_state, judge_experts, merge_hashes
from moeverify.verification.checks.loaded import LoadedState
from moeverify.verification.checks.resumed import Resumed
from moeverify.verification.compare.comparison import Comparison
from moeverify.verification.golden.store import GoldenWriter, StoredGolden

STEP = 0  # saved after one step
WHOLE = Region.whole((3,))
NAME = "weight/w"


@pytest.fixture
def saved(tmp_path: Path) -> StoredGolden:
    with GoldenWriter(tmp_path / "saved") as writer:
        writer.observe(STEP, "loaded", NAME, torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), WHOLE)
        writer.finish({}, {})
    return StoredGolden(tmp_path / "saved")


def load(case: Case, saved: StoredGolden, values: Tensor) -> RankLoad:
    comparison = Comparison(saved)
    comparison.observe(STEP, "loaded", NAME, values, WHOLE)
    return RankLoad(case, [(NAME, values, WHOLE)], saved, list(comparison.entries()), None)


@pytest.mark.parametrize(
    ("values", "others"),
    [
        (torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), []),
        (torch.tensor([-0.0, 1.0, 2.0], dtype=torch.float64), [NAME]),
        (torch.tensor([0.0, 1.0, 2.0], dtype=torch.float32), [NAME]),
        (torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), [NAME]),
    ],
    ids=["equal", "minus zero", "another dtype", "another value"],
)
def test_bits_that_are_not_those_that_were_saved(
    case: Case, saved: StoredGolden, values: Tensor, others: list[str]
) -> None:
    assert LoadedState().inspect(load(case, saved, values)) == others


def test_what_is_equal_as_a_number_alone_is_a_finding(
    run_ranks: Callable, case: Case, saved: StoredGolden
) -> None:
    key = (STEP, "loaded", NAME)
    whole = saved.whole(STEP, f"loaded/{NAME}")
    ranks = run_ranks({0: {}}, {key: whole})
    ranks.show(0, whole, WHOLE, name=NAME, kind="loaded")
    clean = LoadedState().judge(ranks.shown(case), [[]])
    assert clean is not None
    assert (clean.result.verdict, clean.findings) == ("pass", ())
    odd = LoadedState().judge(ranks.shown(case), [[NAME]])
    assert odd is not None
    (finding,) = odd.findings
    assert odd.result.verdict == "mismatch"
    assert (finding.tensor, finding.rank, finding.error, finding.facts) == (NAME, 0, 0.0, BitFacts())
    assert "equal as numbers" in word_finding(finding).evidence[0]


@pytest.fixture
def case() -> Case:
    return build_case(
        {"name": "hand", "recipe": {"model": {"preset": "stress"}, "steps": 4}, "layout": {"dp_shard": 2}}
    )


def test_experts_are_known_by_their_values_whatever_their_division(case: Case) -> None:
    num_experts = cast(int, case.recipe.model.moe.num_experts)  # type: ignore[union-attr]
    shape = (num_experts, 2, 3)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator)
    name = "weight/layers.1.moe.experts.up"

    def hash_over(values: Tensor, regions: list[Region]) -> dict[str, list[int]]:
        shares = [hash_state(case, [(name, region.take(values), region)]) for region in regions]
        return merge_hashes(shares)

    everything = Region.whole(shape)
    half = num_experts // 2
    by_expert = [Region.box(shape, [range(start, start + half), range(2), range(3)]) for start in (0, half)]
    by_row = [Region.box(shape, [range(num_experts), range(row, row + 1), range(3)]) for row in range(2)]
    expected = hash_over(whole, [everything])
    assert hash_over(whole, by_expert) == hash_over(whole, by_row) == expected
    assert hash_over(whole, [*by_row, *by_row]) == expected, "replicas count once"
    assert judge_experts(expected, expected).findings == ()

    swapped = whole.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    (finding,) = judge_experts(expected, hash_over(swapped, by_row)).findings
    assert finding.facts == ExpertFacts(wrong=((0, 1), (1, 0)))
    assert finding.error == pytest.approx(2 / num_experts)
    worded = word_finding(finding)
    assert (worded.where, worded.evidence) == ("expert 0", ("by global number: 0 is 1, 1 is 0",))

    other = whole.clone()
    other[2] += 1.0
    (finding,) = judge_experts(expected, hash_over(other, by_row)).findings
    assert finding.facts == ExpertFacts(wrong=((2, None),))
    assert ExpertHashes().inspect(RankLoad(case, [], cast(StoredGolden, None), [], None)) == []


def test_the_steps_after_a_load_are_compared_bit_by_bit(case: Case, saved: StoredGolden) -> None:
    comparison = Comparison(saved)
    comparison.observe(STEP, "loaded", NAME, torch.zeros(3, dtype=torch.float64), WHOLE)
    (entry,) = comparison.entries()
    after = [entry.__class__(**{**vars(entry), "kind": "update", "step": 1, "bits": bits}) for bits in (5, 7)]
    same = [((1, "update", NAME), bits) for bits in (5, 7)]
    run = RankLoad(case, [], saved, [entry, *after], same)
    assert Resumed().inspect(run) == []
    other = RankLoad(case, [], saved, [entry, *after], [same[0], ((1, "update", NAME), 8)])
    assert Resumed().inspect(other) == [(1, "update", NAME)]
    shorter = RankLoad(case, [], saved, [entry, *after], same[:1])
    assert Resumed().inspect(shorter) == [(-1, "step", "number of steps")]
    assert Resumed().inspect(RankLoad(case, [], saved, [entry, *after], None)) is None, "another layout"
