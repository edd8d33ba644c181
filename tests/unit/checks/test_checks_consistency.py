"""A run against itself: replicas, holes, a layout that divides nothing, a repeat."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moeverify.axes.claims import Claim
from moeverify.checks.consistency import judge_coverage, judge_repeat, judge_replicas, judge_sharding
from moeverify.layout.region import Region

SHAPE = (8, 6)
WHOLE = Region.whole(SHAPE)
HALVES = [Region.box(SHAPE, [range(4), range(6)]), Region.box(SHAPE, [range(4, 8), range(6)])]
# dp_replicate is the slow axis, ep the fast one: replicas of one half are 0 and 2, and 1 and 3.
AXES = {rank: {"dp_replicate": rank // 2, "ep": rank % 2} for rank in range(4)}


def show(ranks, tensors: list[Tensor]) -> None:
    for rank, tensor in enumerate(tensors):
        half = HALVES[rank % 2]
        ranks.show(rank, half.take(tensor), half)


def test_equal_replicas_pass(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    (check,) = judge_replicas(ranks.assemble(), AXES).checks
    assert (check.verdict, check.tensors) == ("pass", 1)


def test_replicas_that_differ_name_the_axis_and_the_rank_that_is_off(
    run_ranks: Callable, weight: Tensor
) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight, weight, 2.0 * weight, weight])
    (finding,) = judge_replicas(ranks.assemble(), AXES).findings
    assert finding.where == "replicas over dp_replicate"
    assert (finding.rank, finding.coordinates) == (2, {"dp_replicate": 1, "ep": 0})
    assert finding.evidence == ("gradient: ranks with equal bits: 0 | 2",)


def test_replicas_over_all_ranks_that_differ_along_one_axis_only(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank in range(4):
        ranks.show(rank, weight * (1.0 + rank % 2), WHOLE)
    (finding,) = judge_replicas(ranks.assemble(), AXES).findings
    assert finding.where == "replicas over ep"
    assert finding.rank == 1


def test_replicas_may_not_differ_in_one_bit_that_every_bound_allows(
    run_ranks: Callable, weight: Tensor
) -> None:
    near = weight.clone()
    near[0, 0] = torch.nextafter(near[0, 0], torch.tensor(math.inf, dtype=torch.float64))
    ranks = run_ranks(AXES)
    show(ranks, [weight, weight, near, weight])
    assert ranks.judge().findings == ()
    assert len(judge_replicas(ranks.assemble(), AXES).findings) == 1


def test_shards_are_no_replicas(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank in range(2):
        ranks.show(rank, HALVES[rank].take(weight), HALVES[rank])
    (check,) = judge_replicas(ranks.assemble(), AXES).checks
    assert (check.verdict, check.tensors) == ("pass", 0)


def test_everything_covered(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    judgement = judge_coverage(ranks.assemble(), {0: {("gradient", "w")}})
    assert judgement.findings == ()


def test_a_hole_and_a_tensor_that_nobody_holds(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank in range(4):
        ranks.show(rank, HALVES[0].take(weight), HALVES[0])
    judgement = judge_coverage(ranks.assemble(), {0: {("gradient", "w"), ("gradient", "v")}, 1: set()})
    hole, nobody = judgement.findings
    assert (hole.tensor, hole.error) == ("w", 0.5)
    assert hole.evidence == ("gradient: the ranks hold 24 of 48 elements",)
    assert (nobody.tensor, nobody.step, nobody.error) == ("v", 0, 1.0)


def test_pieces_that_overlap_cover_too_much(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    ranks.show(0, weight, WHOLE)
    ranks.show(1, HALVES[1].take(weight), HALVES[1])
    (finding,) = judge_coverage(ranks.assemble(), {}).findings
    assert finding.evidence == ("gradient: the ranks hold 72 of 48 elements",)


def test_a_layout_that_divides_nothing_is_not_real(run_ranks: Callable, weight: Tensor) -> None:
    claims = {
        "ep": Claim("gradient", [[0, 1], [2, 3]]),
        "dp_replicate": Claim("gradient", [[0, 2], [1, 3]]),
    }
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    (finding,) = judge_sharding(ranks.assemble(), claims).findings
    assert finding.tensor == "axis dp_replicate"
    assert finding.cause == "no gradient differs in what the ranks of one dp_replicate group hold"

    everywhere = run_ranks(AXES)
    for rank in range(4):
        everywhere.show(rank, weight, WHOLE)
    found = judge_sharding(everywhere.assemble(), claims).findings
    assert [finding.tensor for finding in found] == ["axis ep", "axis dp_replicate"]


def test_only_the_kind_that_is_claimed_counts(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    claims = {"ep": Claim("initial_weight", [[0, 1], [2, 3]])}
    assert len(judge_sharding(ranks.assemble(), claims).findings) == 1


def test_one_group_that_divides_does_not_speak_for_another(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank, region in enumerate([*HALVES, WHOLE, WHOLE]):
        ranks.show(rank, region.take(weight), region)
    (finding,) = judge_sharding(ranks.assemble(), {"ep": Claim("gradient", [[0, 1], [2, 3]])}).findings
    assert (finding.rank, finding.ranks) == (2, (2, 3))


def test_a_group_that_holds_no_such_tensor_is_left_out(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    for rank, region in enumerate(HALVES):
        ranks.show(rank, region.take(weight), region)
    assert judge_sharding(ranks.assemble(), {"ep": Claim("gradient", [[0, 1], [2, 3]])}).findings == ()
    assert len(judge_sharding(ranks.assemble(), {"ep": Claim("gradient", [[2, 3]])}).findings) == 1


def test_a_dense_weight_does_not_speak_for_experts(run_ranks: Callable, weight: Tensor) -> None:
    ranks = run_ranks(AXES)
    show(ranks, [weight] * 4)
    groups = [[0, 1], [2, 3]]
    for part, num_findings in (("all", 0), ("others", 0), ("experts", 1)):
        assert (
            len(judge_sharding(ranks.assemble(), {"ep": Claim("gradient", groups, part)}).findings)
            == num_findings
        )


def test_a_repeat_with_other_bits() -> None:
    key, other = (0, "gradient", "w"), (1, "update", "v")
    assert judge_repeat(7, [], AXES).checks[0].verdict == "pass"
    judgement = judge_repeat(7, [(1, key), (3, key), (0, other)], AXES)
    first, second = judgement.findings
    assert (first.tensor, first.step, first.ranks, first.coordinates) == ("w", 0, (1, 3), AXES[1])
    assert (second.tensor, second.step, second.ranks) == ("v", 1, (0,))
    assert judgement.checks[0].tensors == 7
