"""Self-consistency of a run: replicas, holes, a layout that divides nothing, a repeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeverify.cases.axes.claims import Claim
from moeverify.faults.setting import make_case
from moeverify.parallel.regions.region import Region
from moeverify.report.words.run import word_finding
from moeverify.results.facts import CoverageFacts, ReplicaFacts, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import Check, CheckOutcome, ShownTensors
from moeverify.verification.checks.coverage import Coverage
from moeverify.verification.checks.repeat import BitRecorder, Repeat, find_changed_bits
from moeverify.verification.checks.replicas import Replicas
from moeverify.verification.checks.resumed import Resumed
from moeverify.verification.checks.sharding import Sharding, judge_claims
from moeverify.verification.compare.comparison import Comparison

SHAPE = (8, 6)
WHOLE = Region.whole(SHAPE)
HALVES = [Region.box(SHAPE, [range(4), range(6)]), Region.box(SHAPE, [range(4, 8), range(6)])]
# dp_replicate is the slow axis, ep the fast one: replicas of one half are 0 and 2, and 1 and 3.
AXES = {rank: {"dp_replicate": rank // 2, "ep": rank % 2} for rank in range(4)}


def judge(check: Check[Any], shown: ShownTensors, *reports: Any) -> CheckOutcome:
    outcome = check.judge(shown, reports)
    assert outcome is not None
    return outcome


def find_one(outcome: CheckOutcome) -> Finding:
    (finding,) = outcome.findings
    return word_finding(finding)


def show(ranks, tensors: list[Tensor]) -> None:
    for rank, tensor in enumerate(tensors):
        half = HALVES[rank % 2]
        ranks.show(rank, half.take(tensor), half)


def test_equal_replicas_pass(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    check = judge(Replicas(), ranks.shown()).result
    assert (check.verdict, check.tensors) == ("pass", 1)


def test_replicas_that_differ_name_the_axis_and_the_rank_that_is_off(
    run_ranks: Callable, weight: Tensor
) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight, weight, 2.0 * weight, weight])
    finding = find_one(judge(Replicas(), ranks.shown()))
    assert finding.kind == "gradient"
    assert finding.facts == ReplicaFacts(groups=((0,), (2,)), axes=("dp_replicate",))
    assert finding.where == "replicas over dp_replicate"
    assert (finding.rank, finding.coordinates) == (2, {"dp_replicate": 1, "ep": 0})
    assert finding.evidence == ("gradient: ranks with equal bits: 0 | 2",)


def test_replicas_over_all_ranks_that_differ_along_one_axis_only(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank in range(4):
        ranks.show(rank, weight * (1.0 + rank % 2), WHOLE)
    finding = find_one(judge(Replicas(), ranks.shown()))
    assert finding.where == "replicas over ep"
    assert finding.rank == 1


def test_rounding_alone_makes_no_replica_the_one_that_is_off(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [2.0 * weight, weight, (2.0 + 4e-15) * weight, weight])
    assert find_one(judge(Replicas(), ranks.shown())).rank == 0


def test_replicas_may_not_differ_in_one_bit_that_every_bound_allows(
    run_ranks: Callable, weight: Tensor
) -> None:
    near = weight.clone()
    near[0, 0] = torch.nextafter(near[0, 0], torch.tensor(math.inf, dtype=torch.float64))
    ranks = run_ranks(AXES)
    show(ranks, [weight, weight, near, weight])
    assert ranks.judge().findings == ()
    assert len(judge(Replicas(), ranks.shown()).findings) == 1


def test_shards_are_no_replicas(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank in range(2):
        ranks.show(rank, HALVES[rank].take(weight), HALVES[rank])
    check = judge(Replicas(), ranks.shown()).result
    assert (check.verdict, check.tensors) == ("pass", 0)


def test_everything_covered(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    judgement = judge(Coverage(), ranks.shown(golden_names={0: {("gradient", "w")}}))
    assert judgement.findings == ()


def test_a_hole_and_a_tensor_that_nobody_holds(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank in range(4):
        ranks.show(rank, HALVES[0].take(weight), HALVES[0])
    names: dict[int, set[tuple[str, str]]] = {0: {("gradient", "w"), ("gradient", "v")}, 1: set()}
    outcome = judge(Coverage(), ranks.shown(golden_names=names))
    hole, nobody = map(word_finding, outcome.findings)
    assert hole.facts == CoverageFacts(num_held=24, num_elements=48)
    assert (hole.tensor, hole.error) == ("w", 0.5)
    assert hole.evidence == ("gradient: the ranks hold 24 of 48 elements",)
    assert (nobody.tensor, nobody.step, nobody.error) == ("v", 0, 1.0)


def test_shards_that_overlap_cover_too_much(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    ranks.show(0, weight, WHOLE)
    ranks.show(1, HALVES[1].take(weight), HALVES[1])
    finding = find_one(judge(Coverage(), ranks.shown()))
    assert finding.evidence == ("gradient: the ranks hold 72 of 48 elements",)


def test_a_layout_that_divides_nothing_is_not_real(run_ranks: Callable, weight: Tensor) -> None:
    claims = {
        "ep": Claim("gradient", [[0, 1], [2, 3]]),
        "dp_replicate": Claim("gradient", [[0, 2], [1, 3]]),
    }
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    finding = find_one(judge_claims(ranks.shown(), claims))
    assert finding.facts == ShardingFacts(axis="dp_replicate")
    assert finding.tensor == "axis dp_replicate"
    assert finding.cause == "all ranks of each dp_replicate group hold the same gradient"

    everywhere = run_ranks(AXES)
    for rank in range(4):
        everywhere.show(rank, weight, WHOLE)
    found = judge_claims(everywhere.shown(), claims).findings
    assert [finding.tensor for finding in found] == ["axis ep", "axis dp_replicate"]


def test_each_module_that_should_be_divided_is_looked_at_alone(run_ranks: Callable, weight: Tensor) -> None:
    claims = {
        "ep": Claim("gradient", [[0, 1], [2, 3]], modules=("layers.*.attention", "layers.*.moe.shared"))
    }

    def judge_with(*whole: str) -> CheckOutcome:
        ranks = run_ranks(AXES)
        for name in (
            "layers.0.attention.q",
            "layers.1.attention.q",
            "layers.1.moe.shared.up",
            "layers.1.norm",
        ):
            for rank in range(4):
                region = WHOLE if name in (*whole, "layers.1.norm") else HALVES[rank % 2]
                ranks.show(rank, region.take(weight), region, name=name)
        return judge_claims(ranks.shown(), claims)

    assert judge_with().findings == ()
    finding = find_one(judge_with("layers.1.moe.shared.up"))
    assert finding.facts == ShardingFacts(axis="ep", modules=("layers.1.moe.shared",))
    assert finding.ranks == (0, 1, 2, 3)
    assert "group hold the same gradient of layers.1.moe.shared" in finding.cause


@pytest.mark.parametrize("holders", [(0, 1), (1, 2), (0, 1, 2, 3)])
def test_a_module_that_belongs_on_one_rank_is_found_on_several(
    holders: tuple[int, ...], run_ranks: Callable, weight: Tensor
) -> None:
    claims = {"pp": Claim("gradient", [[0, 1, 2, 3]], modules=("layers.*",), once=True)}

    def judge_with(*ranks_of_last: int) -> CheckOutcome:
        ranks = run_ranks(AXES)
        for rank in (0, 3):
            ranks.show(rank, weight, WHOLE, name="embed.weight")  # tied: on the first and the last stage
        for layer in range(3):
            ranks.show(layer, weight, WHOLE, name=f"layers.{layer}.norm")
        for rank in ranks_of_last:
            ranks.show(rank, weight, WHOLE, name="layers.3.norm")
        return judge_claims(ranks.shown(), claims)

    assert judge_with(3).findings == ()
    finding = find_one(judge_with(*holders))
    assert finding.facts == ShardingFacts(axis="pp", modules=("layers.3",), is_repeated=True)
    assert finding.cause == "layers.3: on several ranks of one pp group instead of one"


def test_only_the_kind_that_is_claimed_counts(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    claims = {"ep": Claim("initial_weight", [[0, 1], [2, 3]])}
    assert len(judge_claims(ranks.shown(), claims).findings) == 1


def test_one_group_that_divides_does_not_speak_for_another(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank, region in enumerate([*HALVES, WHOLE, WHOLE]):
        ranks.show(rank, region.take(weight), region)
    (finding,) = judge_claims(ranks.shown(), {"ep": Claim("gradient", [[0, 1], [2, 3]])}).findings
    assert (finding.rank, finding.ranks) == (2, (2, 3))


def test_a_group_that_holds_no_such_tensor_is_left_out(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank, region in enumerate(HALVES):
        ranks.show(rank, region.take(weight), region)
    assert judge_claims(ranks.shown(), {"ep": Claim("gradient", [[0, 1], [2, 3]])}).findings == ()
    assert len(judge_claims(ranks.shown(), {"ep": Claim("gradient", [[2, 3]])}).findings) == 1


def test_a_dense_weight_does_not_speak_for_experts(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    groups = [[0, 1], [2, 3]]
    for part, num_findings in (("all", 0), ("others", 0), ("experts", 1)):
        assert (
            len(judge_claims(ranks.shown(), {"ep": Claim("gradient", groups, part)}).findings) == num_findings
        )


def test_a_run_that_does_not_show_its_start_has_no_sharding_to_judge(
    run_ranks: Callable, weight: Tensor
) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    assert Sharding().judge(ranks.shown(), ()) is None
    for rank in range(4):
        ranks.show(rank, weight, WHOLE, kind="initial_weight", step=-1)
    assert judge(Sharding(), ranks.shown()).result.verdict == "pass", "the layout has one rank"


def test_a_repeat_with_other_bits(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    shown = ranks.shown()
    key, other = (0, "gradient", "w"), (1, "update", "v")
    clean = judge(Repeat(), shown, [], [], [], [])
    assert (clean.result.verdict, clean.result.tensors, clean.findings) == ("pass", 1, ())
    first, second = map(word_finding, judge(Repeat(), shown, [other], [key], [], [key]).findings)
    assert (second.tensor, second.step, second.ranks, second.coordinates) == ("w", 0, (1, 3), AXES[1])
    assert (first.tensor, first.step, first.ranks) == ("v", 1, (0,))
    assert second.evidence == ("gradient: other bits when the same layout ran a second time",)
    assert Repeat().judge(shown, []) is None, "the case asked for no second run"


def test_the_steps_after_a_load_are_judged_where_the_same_layout_saved(
    run_ranks: Callable, weight: Tensor
) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    assert Resumed().judge(ranks.shown(), []) is None
    assert judge(Resumed(), ranks.shown(), [], [], [], []).result.verdict == "pass"
    finding = find_one(judge(Resumed(), ranks.shown(), [], [], [(2, "update", "w")], []))
    assert (finding.check, finding.kind, finding.rank, finding.step) == ("resumed", "update", 2, 2)
    assert "without a checkpoint" in finding.evidence[0]


def test_bits_are_compared_shard_by_shard_and_absent_ones_not_at_all(weight: Tensor) -> None:
    comparison, recorder = Comparison(NOTHING), BitRecorder()
    near = weight.clone()
    near[0, 0] = torch.nextafter(near[0, 0], torch.tensor(math.inf, dtype=torch.float64))
    for observer, second in ((comparison, weight), (recorder, near)):
        observer.observe(0, "gradient", "same", weight, WHOLE)
        observer.observe(0, "gradient", "other", second, WHOLE)
        observer.observe(0, "gradient", "absent", None, WHOLE)
        observer.observe(0, "weight", "uncompared", second, WHOLE)
    assert find_changed_bits(list(comparison.entries()), list(recorder.hashes())) == [
        (0, "gradient", "other")
    ]


class Nothing:
    """An empty golden."""

    def read(self, step: int, kind: str, name: str, region: Region) -> Tensor | None:
        return None


NOTHING = Nothing()


def test_replicas_of_a_kind_whose_check_is_skipped_may_differ(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight, weight, 2.0 * weight, weight])
    case = make_case("skipping", dp_replicate=2, ep=2)
    for skip, num_findings in (("gradient",), 0), (("update",), 1):
        checks = case.checks.model_copy(update={"skip": skip})
        shown = ranks.shown(case.model_copy(update={"checks": checks}))
        assert len(judge(Replicas(), shown).findings) == num_findings
