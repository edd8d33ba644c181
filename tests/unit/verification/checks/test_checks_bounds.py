"""Bounds of logical tensors: measured noise, floors, and the effect of gradient noise on updates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moeverify.cases.schema import Tolerance
from moeverify.verification.checks.bounds import Bounds, Criterion, Norms
from moeverify.verification.golden.noise import noise_key

RELATIVE = Criterion()


def bound(
    bounds: Bounds,
    step: int,
    kind: str,
    name: str,
    *,
    criterion: Criterion = RELATIVE,
    expected_norm: float = 1.0,
    kind_norm: float = 1.0,
) -> float:
    return bounds.bound((step, kind, name), criterion, Norms(expected_norm, kind_norm))


def test_calibrated_bounds_follow_the_noise_and_never_an_unusable_one() -> None:
    tolerance = Tolerance(factor=8.0)
    noise = {"0/gradient/a": 1e-6, "0/gradient/b": 3e-6, "0/gradient/c": 2e-6, "1/gradient/a": math.inf}
    bounds = Bounds(tolerance, "float32", noise)
    assert bound(bounds, 0, "gradient", "b") == pytest.approx(24e-6)
    assert bound(bounds, 0, "gradient", "a") == pytest.approx(16e-6)  # raised to the median
    assert bound(bounds, 0, "update", "a") == 4 * 2.0**-23  # nothing measured: the floor
    assert bound(bounds, 1, "gradient", "a") == 4 * 2.0**-23
    assert bound(bounds, 0, "initial_weight", "a", criterion=Criterion(exact=True)) == 0.0
    small = bound(bounds, 0, "update", "tiny", expected_norm=1e-9)
    assert small == pytest.approx(2.0**-23 / 1e-9)  # below the rounding of its kind


def test_below_float64_the_rounding_of_its_kind_hides_no_tensor_whose_noise_was_measured() -> None:
    noise = {"0/gradient/a": 0.01, "0/gradient/b": 0.01}
    measured = Bounds(Tolerance(factor=8.0), "bfloat16", noise)
    assert bound(measured, 0, "gradient", "a", expected_norm=0.01) == pytest.approx(
        0.08
    )  # and not 2**-7 / 0.01
    assert bound(measured, 0, "gradient", "c", expected_norm=0.01) == pytest.approx(2.0**-7 / 0.01)
    known = Bounds(Tolerance(factor=8.0), "float64", {"0/gradient/a": 1e-15})
    assert bound(known, 0, "gradient", "a", expected_norm=1e-9) == pytest.approx(2.0**-52 / 1e-9)


def test_a_forced_step_has_bounds_of_its_own_from_the_second_on() -> None:
    noise = {"0/gradient/a": 0.01, "1/gradient/a": 0.05, "forced/1/gradient/a": 0.02, "1/gradient/b": 0.05}
    free, forced = (Bounds(Tolerance(factor=8.0), "bfloat16", noise, forced) for forced in (False, True))
    assert [bound(bounds, 0, "gradient", "a") for bounds in (free, forced)] == pytest.approx([0.08] * 2)
    assert bound(free, 1, "gradient", "a") == pytest.approx(0.4)
    assert bound(forced, 1, "gradient", "a") == pytest.approx(0.16)


def test_narrow_parts_widen_the_bounds_of_the_tensors_that_depend_on_them_alone() -> None:
    noise = {f"0/gradient/{name}": 1e-6 for name in "abc"} | {"0/gradient/d": 1e-16}
    noise |= {f"narrow/0/gradient/{name}": size for name, size in (("a", 1e-6), ("b", 5e-6), ("c", 1e-6))}
    bounds = Bounds(Tolerance(factor=8.0), "float64", noise)
    assert bound(bounds, 0, "gradient", "a") == pytest.approx(8e-6), "not the 5e-6 of another tensor"
    assert bound(bounds, 0, "gradient", "b") == pytest.approx(40e-6)
    assert bound(bounds, 0, "gradient", "d") == 1e-10


def test_the_parts_of_a_bound_name_their_sources() -> None:
    noise = {"0/gradient/a": 1e-3, "0/gradient/b": 5e-3, "0/gradient/c": 5e-3}
    bounds = Bounds(Tolerance(factor=8.0), "bfloat16", noise)
    norms = Norms(1.0, 1.0)
    parts = bounds.list_parts((0, "gradient", "a"), Criterion(), norms)
    assert {part: size for part, size in parts.items() if size} == pytest.approx(
        {"measured": 8e-3, "typical": 40e-3, "floor": 2.0**-7}
    )
    assert max(parts.values()) == bound(bounds, 0, "gradient", "a")
    parts = Bounds(Tolerance(), "float64", {}).list_parts((0, "gradient", "a"), Criterion(), norms)
    assert max(parts, key=parts.__getitem__) == "floor"


def test_the_bound_of_an_update_holds_what_sign_flips_do_and_no_more_than_all_noise_does() -> None:
    noise = {f"0/update/{name}": 0.08 for name in "abcd"}
    noise |= {"0/update/small": 0.001, "forced/1/update/small": 0.001, "1/update/small": 0.001}
    known = noise | {
        "0/sign flips/small": 0.09,
        "0/update drift/small": 0.1,
        "0/sign flips/a": 0.01,
        "0/update drift/a": 0.02,
    }
    known |= {"forced/1/sign flips/small": 0.05, "forced/1/update drift/small": 0.07}
    before, after = (Bounds(Tolerance(), "mixed", found) for found in (noise, known))
    assert bound(before, 0, "update", "small") == pytest.approx(8 * 0.08)  # the median
    assert bound(after, 0, "update", "small") == pytest.approx(8 * 0.09 + 0.001)
    assert bound(after, 0, "update", "a") == pytest.approx(8 * 0.02 + 0.08)
    assert bound(after, 0, "update", "b") == pytest.approx(8 * 0.08)  # nothing known about it: as before
    assert bound(after, 0, "gradient", "small") == bound(before, 0, "gradient", "small")
    forced = Bounds(Tolerance(), "mixed", known, forced=True)
    assert bound(forced, 1, "update", "small") == pytest.approx(8 * 0.05 + 0.001)
    sharper = Bounds(Tolerance(factor=2.0), "mixed", known)
    assert bound(sharper, 0, "update", "small") == pytest.approx(2 * 0.09 + 0.001)


def test_mixed_bounds_have_the_floor_of_bfloat16_and_the_epsilon_of_float32() -> None:
    bounds = Bounds(Tolerance(), "mixed", {noise_key(0, "gradient", "a"): 1e-2})
    assert bound(bounds, 0, "gradient", "a") == pytest.approx(8e-2)
    assert bound(bounds, 1, "gradient", "a") == 2.0**-7
    assert (
        bound(bounds, 1, "gradient", "a", expected_norm=1e-3) == 2.0**-7
    )  # not drowned by the others of its kind
    assert bounds.zero_bound() == 2.0**-23


def test_exact_and_fixed_bounds() -> None:
    assert bound(Bounds(Tolerance(kind="exact"), "float64", {}), 0, "gradient", "a") == 0.0
    fixed = Bounds(Tolerance(kind="fixed", rtol=1e-3, atol=1e-2), "float64", {})
    assert bound(fixed, 0, "gradient", "a", expected_norm=4.0, kind_norm=9.0) == pytest.approx(
        1e-3 + 1e-2 / 4.0
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_the_noise_of_moments_leaves_no_room_to_a_counter_of_steps(precision: Any) -> None:
    noise = {f"9/optimizer_state/{name}": 0.08 for name in ("w.exp_avg", "w.exp_avg_sq", "v.exp_avg")}
    noise |= {"9/optimizer_state/w.step": 0.0, "9/optimizer_state/v.step": 0.0}
    bounds = Bounds(Tolerance(), precision, noise)
    assert bound(bounds, 9, "optimizer_state", "w.step", expected_norm=200.0) < 1.0 / 200.0
    assert bound(bounds, 9, "optimizer_state", "w.exp_avg") == pytest.approx(8 * 0.08)
