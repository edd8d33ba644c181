"""The evidence behind a cause: every test says something, also those that say no."""

import pytest
import torch

from moeverify.diagnose.axes import Axes
from moeverify.diagnose.diagnosis import Material, diagnose
from moeverify.diagnose.evidence import STEP_BEFORE, Piece, Suspect
from moeverify.diagnose.gradient import name_gradient_causes
from moeverify.diagnose.state import name_initial
from moeverify.diagnose.trials import list_trials
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding

AXES = Axes({"dp_replicate": [[0, 1]], "ep": [[0, 1]]}, {"dp_replicate": 2, "ep": 2})


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make(expected, *locals_, name="layers.0.mlp.weight", kind="gradient", step=0):
    region = Region.whole(expected.shape)
    pieces = [Piece(rank, region, local) for rank, local in enumerate(locals_)]
    return Suspect((step, kind, name), expected, pieces=pieces)


def said(suspect, **options):
    arguments = {"axes": AXES, "fits": (), "earlier": {}, "stale": None, **options}
    return {trial.name: trial for trial in list_trials(suspect, *arguments.values())}


def test_a_factor_is_read_to_ten_digits_and_the_other_tests_say_no():
    expected = draw(8, 8)
    found = said(make(expected, 1.2345678901 * expected, 1.2345678901 * expected))
    assert found["one factor"].verdict == "yes"
    assert abs(found["one factor"].coefficients["golden"] - 1.2345678901) < 1e-10
    assert found["one factor"].residual < 1e-14
    assert found["absent or zero"].verdict == "no"
    assert found["right values in other places"].verdict == "no"
    assert found["rounding of a lower precision"].verdict == "no"
    assert (
        found["sum of the replicas over dp_replicate"].words == "the replicas are equal, so none is an addend"
    )


def test_addends_say_the_factor_of_their_sum():
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    found = said(make(expected, part, expected - part))
    assert found["sum of the replicas over ep"].verdict == "yes"
    assert found["sum of the replicas over ep"].coefficients == {"golden": 1.0}
    assert found["one factor"].verdict == "no"
    other = said(make(expected, part, draw(4, 3, seed=2)))["sum of the replicas over ep"]
    assert (other.verdict, other.words) == ("no", "the sum is no multiple of the golden")
    assert other.residual > 0.1


def test_a_sum_with_something_infinite_explains_nothing():
    expected = draw(4, 3)
    broken = expected.clone()
    broken[0, 0] = float("nan")
    assert said(make(expected, broken, expected))["sum of the replicas over ep"].verdict == "no"


def test_zero_and_absent_and_moved_and_rounded_are_seen():
    expected = draw(8, 8)
    assert said(make(expected, 0 * expected))["absent or zero"].verdict == "yes"
    assert said(make(expected, None, expected))["absent or zero"].words == "there is none on rank 0"
    assert said(make(expected, expected.roll(1, 0)))["right values in other places"].verdict == "yes"
    assert said(make(expected, expected.float().double()))["rounding of a lower precision"].verdict == "yes"
    mixed = torch.cat([expected[:3], draw(5, 8, seed=3)])
    words = said(make(expected, mixed))["right values in other places"].words
    assert words.startswith("3 of 8 slices along dim 0")


def test_the_value_of_the_step_before_is_tried():
    expected, before = draw(4, 4), draw(4, 4, seed=1)
    assert said(make(expected, before), earlier={STEP_BEFORE: before})[STEP_BEFORE].verdict == "yes"
    assert said(make(expected, 2 * before), earlier={STEP_BEFORE: before})[STEP_BEFORE].verdict == "no"
    assert said(make(expected, before), earlier={STEP_BEFORE: None})[STEP_BEFORE].verdict == "untried"
    assert said(make(expected, before), earlier={STEP_BEFORE: expected})[STEP_BEFORE].verdict == "untried"


def test_a_gradient_of_the_step_before_is_named_stale():
    expected, before = draw(4, 4), draw(4, 4, seed=1)
    suspect = make(expected, before, before, step=1)
    (named,) = name_gradient_causes([suspect], None, AXES, lambda key: before)
    assert named.verdict.cause is Cause.STALE


def test_a_factor_of_a_users_model_is_named_without_parts():
    expected, other = draw(6, 6), draw(5, 5, seed=1)
    suspects = [make(expected, *2 * [2 * expected]), make(other, *2 * [2 * other], name="head")]
    (named,) = name_gradient_causes(suspects, None, Axes({}, {"dp_shard": 2}))
    assert named.verdict.cause is Cause.SCALE
    assert named.verdict.sentence == "every value is 2 = dp_shard times the right one"
    assert named.verdict.axes == ("dp_shard",)
    assert {fit.verdict for fit in named.fits} == {"yes", "untried"}


def test_axes_of_the_same_ranks_are_both_named_unless_one_has_nothing_to_do_with_it():
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    suspect = make(expected, part, expected - part)
    (named,) = name_gradient_causes([suspect], None, AXES)
    assert named.verdict.axes == ("dp_replicate", "ep")
    assert "cannot tell" in named.verdict.sentence
    dense = Axes(AXES.groups, AXES.degrees, lambda axis, tensor: axis != "ep" or "moe" in tensor)
    (named,) = name_gradient_causes([suspect], None, dense)
    assert named.verdict.axes == ("dp_replicate",)


def test_one_missing_reduction_of_dense_and_expert_tensors_is_one_cause():
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    names = ("layers.0.moe.experts.up", "layers.0.mlp.weight")
    suspects = [make(expected, part, expected - part, name=name) for name in names]
    axes = Axes(AXES.groups, AXES.degrees, lambda axis, tensor: axis != "ep" or "moe" in tensor)
    (named,) = name_gradient_causes(suspects, None, axes)
    assert len(named.suspects) == 2
    assert named.verdict.axes == ("dp_replicate",)


def test_a_replica_that_starts_otherwise_is_no_permutation():
    expected = draw(8, 4)
    (named,) = name_initial([make(expected, expected, draw(8, 4, seed=5), kind="initial_weight", step=-1)])
    assert named.verdict.cause is Cause.REPLICAS
    assert named.verdict.where == "rank 1"


def test_an_origin_carries_its_place_and_trials_and_a_follower_none():
    expected = draw(4, 4)
    suspect = make(expected, 2 * expected, 2 * expected)
    fields = {"rank": 1, "ranks": (0, 1), "error": 1.0, "bound": 1e-10}
    findings = [
        Finding(check="gradient", tensor="layers.0.mlp.weight", step=0, **fields),
        Finding(check="update", tensor="layers.0.mlp.weight", step=0, **fields),
    ]
    material = Material(
        suspects={suspect.key: suspect},
        axes=AXES,
        issued=lambda module, rank: (f"all_reduce in {module} by {rank}",),
    )
    origin, follower = diagnose(findings, material)
    assert origin.place.module == "layers.0.mlp"
    assert origin.place.axes == ("dp_replicate", "ep")
    assert origin.place.collectives == ("all_reduce in layers.0.mlp by 1",)
    assert [trial.verdict for trial in origin.trials if trial.name == "one factor"] == ["yes"]
    assert follower.follows == origin.tensor
    assert follower.trials == ()
    assert follower.place is None


@pytest.mark.parametrize(("precision", "says"), [(torch.float64, False), (torch.bfloat16, True)])
def test_where_rounding_may_hide_a_cause_the_way_to_see_it_is_told(precision, says):
    expected = draw(6, 4)
    suspect = make(expected, draw(6, 4, seed=3), draw(6, 4, seed=3))
    suspect.precision = precision
    finding = Finding(
        check="gradient", tensor=suspect.name, step=0, rank=0, ranks=(0, 1), error=1.0, bound=0.1
    )
    (told,) = diagnose([finding], Material(suspects={suspect.key: suspect}, axes=AXES))
    assert told.cause.startswith("no linear combination")
    assert any("--set recipe.precision=float64" in line for line in told.evidence) == says
