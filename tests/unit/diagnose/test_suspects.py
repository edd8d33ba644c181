"""Tests of single suspects: replicas, places, rounding."""

import torch

from moeverify.diagnose.evidence import Piece, Suspect
from moeverify.diagnose.permutation import examine_places, match_slices
from moeverify.diagnose.replicas import examine_replica_sums
from moeverify.diagnose.rounding import examine_rounding
from moeverify.layout.region import Region
from moeverify.results.cause import Cause

KEY = (0, "gradient", "layers.1.moe.router.weight")


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make(expected, *locals_, region=None):
    region = region or Region.whole(expected.shape)
    return Suspect(KEY, expected, pieces=[Piece(rank, region, local) for rank, local in enumerate(locals_)])


def test_replicas_that_add_up_name_the_axis():
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    suspect = make(expected, part, expected - part)
    verdict = examine_replica_sums(suspect, {"tp": [[0, 1]]})
    assert verdict.cause is Cause.MISSING_REDUCTION
    assert verdict.where == "axis tp"


def test_replicas_that_average_to_the_golden_are_a_missing_reduction_too():
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    suspect = make(expected, 2 * part, 2 * (expected - part))
    assert examine_replica_sums(suspect, {"dp_replicate": [[0, 1]]}).cause is Cause.MISSING_REDUCTION


def test_only_the_axis_that_explains_it_is_named():
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    suspect = make(expected, part, part, expected - part, expected - part)
    groups = {"cp": [[0, 1], [2, 3]], "tp": [[0, 2], [1, 3]]}
    assert examine_replica_sums(suspect, groups).where == "axis tp"


def test_equal_replicas_are_no_missing_reduction():
    expected = draw(4, 3)
    assert examine_replica_sums(make(expected, expected / 2, expected / 2), {"tp": [[0, 1]]}) is None


def test_sharded_pieces_are_summed_region_by_region():
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    suspect = Suspect(KEY, expected)
    for shard in range(2):
        region = Region.box((4, 3), (range(2 * shard, 2 * shard + 2), range(3)))
        suspect.pieces += [
            Piece(shard, region, region.take(part)),
            Piece(shard + 2, region, region.take(expected - part)),
        ]
    groups = {"dp_replicate": [[0, 2], [1, 3]]}
    assert examine_replica_sums(suspect, groups).cause is Cause.MISSING_REDUCTION


def test_swapped_slices_are_a_permutation():
    expected = draw(6, 5)
    verdict = examine_places(make(expected, expected[[0, 2, 1, 3, 4, 5]]))
    assert verdict.cause is Cause.PERMUTATION
    assert "1 holds 2" in verdict.sentence


def test_copies_are_duplicates_along_any_dim():
    expected = draw(4, 6)
    actual = torch.cat([expected[:, :3], expected[:, :3]], dim=1)
    verdict = examine_places(make(expected, actual))
    assert verdict.cause is Cause.DUPLICATE
    assert verdict.where == "dim 1"


def test_a_tensor_in_its_place_has_not_moved():
    expected = torch.ones(4, 3, dtype=torch.float64)  # every slice equals every other
    assert match_slices(expected, expected.clone(), 0) == [0, 1, 2, 3]
    assert examine_places(make(expected, expected.clone())) is None


def test_another_order_of_all_elements_is_a_permutation():
    expected = draw(8, 4)
    verdict = examine_places(make(expected, expected.flatten()[torch.randperm(32)].view(8, 4)))
    assert verdict.cause is Cause.PERMUTATION


def test_values_of_a_lower_precision_are_rounding():
    expected = draw(64, 8)
    assert examine_rounding([make(expected, expected.to(torch.bfloat16).double())]).cause is Cause.ROUNDING
    assert "float32" in examine_rounding([make(expected, expected.float().double())]).sentence


def test_a_factor_is_not_rounding():
    expected = draw(64, 8)
    assert examine_rounding([make(expected, expected * 1.002)]) is None


def test_the_recipes_own_precision_is_no_finding():
    expected = draw(64, 8)
    suspect = make(expected, expected.float().double())
    suspect.precision = torch.float32
    assert examine_rounding([suspect]) is None
