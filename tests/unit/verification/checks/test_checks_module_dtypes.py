"""Dtypes of module outputs and residual streams, as they are and beside those of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moeverify.parallel.regions.region import Region
from moeverify.report.words.run import word_finding
from moeverify.results.facts import DtypeUse, NarrowParts
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.dtype_watch import DtypeWatch, Sighting
from moeverify.verification.checks.precision import OneDevice, Precision, Wanted, judge_dtypes


class Block(nn.Module):
    """A residual block; `way` is the place of a cast: in the branch, on the stream, after it, or elsewhere."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        branch = self.linear(x)
        if self.way == "branch":
            return x * 0.5 + branch.bfloat16()
        if self.way == "widened":
            return x.double() + branch.double()
        if self.way == "cast alone":
            return x.bfloat16()
        if self.way == "stream":
            return x.bfloat16() + branch.bfloat16()
        return (x + branch).bfloat16() if self.way == "after" else torch.tanh(branch).bfloat16()


def sight(*ways: str, num_steps: int = 1) -> list[Sighting]:
    """Return the sightings of a model of such blocks; every narrowed stream is taken for wrong."""
    model = nn.Sequential(nn.Linear(4, 4), *(Block(way) for way in ways))
    watch = DtypeWatch(
        model, torch.float32, lambda number: (), lambda sighting: sighting.use is DtypeUse.RESIDUAL
    )
    for step in range(num_steps):
        watch.begin_step(step)
        model(torch.ones(2, 4)).sum().backward()
    watch.close()
    assert not torch.is_anomaly_enabled()
    return watch.report()


def streams(sightings: list[Sighting]) -> list[tuple[str, str, str]]:
    return [(each.parameter, each.how, each.dtype) for each in sightings if each.use is DtypeUse.RESIDUAL]


def test_outputs_have_their_dtypes() -> None:
    found = {each.parameter: each.dtype for each in sight("other") if each.use is DtypeUse.OUTPUT}
    assert found == {"": "bfloat16", "0": "float32", "1": "bfloat16", "1.linear": "float32"}


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("branch", []),
        ("widened", []),
        ("cast alone", []),
        ("other", []),
        ("stream", [("1", "float32", "bfloat16")]),
        ("after", [("1", "float32", "bfloat16")]),
    ],
)
def test_a_cast_on_the_stream_is_told_from_one_beside_it(
    way: str, expected: list[tuple[str, str, str]]
) -> None:
    assert streams(sight(way)) == expected


def test_the_second_step_shows_the_line_of_a_wrong_stream() -> None:
    [found] = [each for each in sight("stream", num_steps=3) if each.use is DtypeUse.RESIDUAL]
    assert found.site.startswith("test_checks_module_dtypes.py:")
    assert found.site.endswith(" in forward")
    assert not any(each.site for each in sight("stream"))


@pytest.fixture
def shown(run_ranks: Callable) -> ShownTensors:
    found: ShownTensors = run_ranks({0: {"tp": 0}, 1: {"tp": 1}}).shown()
    return found


def judge(shown: ShownTensors, one_device: OneDevice, *rank: Sighting) -> list[tuple[str, str, str]]:
    """Return (tensor, cause, follows) of each finding in a recipe that states no dtypes."""
    wanted = Wanted("float64", "float64", one_device=one_device, is_stated=False)
    findings = judge_dtypes(shown, [list(rank)], wanted).findings
    return [(each.tensor, word_finding(each).cause, each.follows) for each in findings]


def output(module: str, dtype: str) -> Sighting:
    return Sighting(DtypeUse.OUTPUT, module, dtype, "0")


def test_what_is_narrower_than_on_one_device_is_wrong_and_the_first_module_is_named(
    shown: ShownTensors,
) -> None:
    one = {output(name, "").key: "float64" for name in ("norm", "head")} | {
        ("output", "cast", "0"): "float32"
    }
    right = [output("norm", "float64"), output("head", "float64"), output("cast", "float64")]
    assert judge(shown, one, *right) == [], "a wider output is right"
    assert judge(shown, {}, output("norm", "float32")) == [], "nothing is known of one device"
    wrong = [output("cast", "float32"), output("norm", "float32"), output("head", "float32")]
    [(tensor, cause, follows)] = judge(shown, one, *wrong)
    assert (tensor, follows) == ("norm", "")
    assert cause == "the output of norm has dtype float32, and on one device float64"


def test_narrow_outputs_follow_from_narrow_weights(shown: ShownTensors) -> None:
    sightings = [
        output("norm", "float32"),
        Sighting(DtypeUse.COMPUTES, "norm.weight", "float32"),
        Sighting(DtypeUse.OPTIMIZER_STATE, "head.weight", "bfloat16", "exp_avg"),
    ]
    one = {each.key: "float64" for each in sightings}
    found = judge(shown, one, *sightings)
    assert [(tensor, follows) for tensor, _, follows in found] == [
        ("norm", ""),
        ("norm", "norm"),
        ("head", ""),
    ]


def test_a_stream_that_one_device_narrows_too_is_right(shown: ShownTensors) -> None:
    seen = Sighting(DtypeUse.RESIDUAL, "blocks.0", "bfloat16", "float32")
    [(tensor, cause, _)] = judge(shown, {("output", "blocks.0", "0"): "float32"}, seen)
    assert tensor == "blocks.0"
    assert cause == "blocks.0 casts its residual stream from float32 to bfloat16, and one device does not"
    assert judge(shown, {seen.key: "bfloat16"}, seen) == []


def test_narrow_parts_are_told_where_nothing_is_wrong(run_ranks: Callable, weight: Tensor) -> None:
    run = run_ranks({0: {}}, noise={"narrow/0/gradient/w": 1e-6})
    run.show(0, weight, Region.whole(weight.shape))
    shown = run.shown()
    assert Precision().judge(shown, [[output("norm", "float64")]]) is None
    known = replace(shown, dtypes={(DtypeUse.NARROW, "norm", ""): "float32"})
    outcome = Precision().judge(known, [[output("norm", "float64")]])
    assert outcome is not None
    assert outcome.result.facts == NarrowParts(
        dtype="float32", modules=("norm",), num_tensors=1, num_compared=1
    )


class Soft(nn.Module):
    """Attends by a softmax in the dtype `within`, and computes another number in the narrow dtype first."""

    def __init__(self, within: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.within = within

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        gate = torch.softmax(x, -1)
        return gate * torch.softmax(x.to(self.within), -1).to(x.dtype)


def sight_operators(within: torch.dtype, one_device: OneDevice | None = None) -> list[Sighting]:
    """Return the operators of a bfloat16 model with a softmax in a dtype."""
    wanted = Wanted("bfloat16", "bfloat16", one_device=one_device or {}, is_stated=False)
    model = nn.Sequential(Soft(within)).bfloat16()
    watch = DtypeWatch(model, torch.bfloat16, lambda number: (), wanted.is_wrong, sees_operators=True)
    watch.begin_step(0)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    watch.close()
    return [each for each in watch.report() if each.use is DtypeUse.OPERATOR]


def test_an_operator_that_one_device_widens_is_wrong_where_ranks_do_not(shown: ShownTensors) -> None:
    wide, narrow = sight_operators(torch.float32), sight_operators(torch.bfloat16)
    dtypes = {(each.parameter, each.how): each.dtype for each in wide}
    assert dtypes == {
        ("0.linear", "linear"): "bfloat16",
        ("0", "softmax"): "float32",
        ("0", "mul"): "bfloat16",
    }
    one = {each.key: each.dtype for each in wide}
    assert judge(shown, one, *wide) == []
    assert judge(shown, {each.key: each.dtype for each in narrow}, *wide) == [], "a wider operator is right"
    assert judge(shown, {}, *narrow) == [], "nothing is known of one device"
    [(module, cause, _)] = judge(shown, one, *sight_operators(torch.bfloat16, one))
    assert (module, cause) == ("0", "softmax in 0 computes in bfloat16, and on one device in float32")
    [site] = [each.site for each in sight_operators(torch.bfloat16, one) if each.how == "softmax"]
    assert site.startswith("test_checks_module_dtypes.py:")
    assert site.endswith(" in forward")


def step_alone(total: torch.dtype) -> list[Sighting]:
    """Return the operators of a step that adds up gradients in a dtype, outside of all modules."""
    model = nn.Linear(4, 4).bfloat16()
    watch = DtypeWatch(model, torch.bfloat16, lambda number: (), sees_operators=True, has_own_step=True)
    watch.begin_step(0)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    add_up(torch.zeros(4, 4, dtype=total), model.weight)
    watch.observe(0, "gradient", "weight", model.weight.grad, Region.whole((4, 4)))
    add_up(torch.zeros(4, 4, dtype=torch.float64), model.weight)
    watch.close()
    return [each for each in watch.report() if each.use is DtypeUse.OPERATOR]


def add_up(total: Tensor, weight: Tensor) -> None:
    total += weight.grad


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
def test_a_users_step_is_seen_by_function_until_it_shows_its_gradients(total: torch.dtype) -> None:
    found = {(each.parameter, each.how): each.dtype for each in step_alone(total)}
    assert found["add_up", "add"] == str(total).removeprefix("torch.")
