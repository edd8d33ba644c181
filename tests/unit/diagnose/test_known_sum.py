"""A sum of known tensors in the place of the right one is named, and what is no such sum is not."""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.hypotheses.base import Outcome
from moeverify.diagnose.hypotheses.known_sum import HYPOTHESIS
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.report.words.cause import describe_explanation
from moeverify.results.known_sum import KnownSum
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading

NAMES = ("input:a", "output:a.norm", "output:a.attention", "output:b")


def _draw(seed: int) -> Tensor:
    return torch.randn(4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


KNOWN = {name: _draw(number) for number, name in enumerate(NAMES)}
RIGHT = KNOWN["input:a"] + KNOWN["output:a.attention"]


def _test(*actual: Tensor) -> Outcome:
    """Return what is said of the output of `a`, whose later readings are no parts of it."""
    readings = []
    for order, (name, value) in enumerate([*KNOWN.items(), ("output:a", RIGHT), ("output:later", _draw(9))]):
        end, _, module = name.partition(":")
        readings.append(Reading(FORWARD, order, module, end, 0, value))
    region = Region.whole(RIGHT.shape)
    shards = tuple(RankShard(rank, region, value) for rank, value in enumerate(actual))
    tensor = WrongTensor((0, MODULE_KINDS[FORWARD], "a"), RIGHT, shards)
    origin = Origin("forward", "a", "output", 1.0, (0,), tensor)
    search = Search({FORWARD: origin}, {FORWARD: 4, BACKWARD: 1}, {FORWARD: 0.0}, 1e-9, golden=readings)
    return HYPOTHESIS.test([tensor], DiagnosisInputs(search=search))


def _name(outcome: Outcome) -> str:
    return describe_explanation(outcome.explanation) if outcome.explanation is not None else ""


def test_a_term_from_another_point_is_named() -> None:
    outcome = _test(KNOWN["output:a.norm"] + 0.3 * KNOWN["output:a.attention"])
    assert _name(outcome) == "a puts out 0.3 times the output of a.attention + the output of a.norm"


def test_what_is_added_to_the_right_value_is_named() -> None:
    outcome = _test(RIGHT - 2.0 * KNOWN["output:b"])
    assert _name(outcome) == "a puts out what it should be - 2 times the output of b"


def test_ranks_that_are_right_are_left_out() -> None:
    outcome = _test(RIGHT, RIGHT + KNOWN["output:b"])
    assert outcome.explanation is not None
    assert isinstance(outcome.explanation.operation, KnownSum)
    assert outcome.explanation.operation.ranks == (1,)


def test_what_is_no_sum_of_three_is_not_named() -> None:
    assert _test(KNOWN["input:a"] * KNOWN["output:b"]).explanation is None
    assert _test(RIGHT + 0.1 * _draw(5)).explanation is None
    four = sum(number * value for number, value in enumerate(KNOWN.values(), 2)) + torch.zeros_like(RIGHT)
    assert _test(four).explanation is None
    assert _test(RIGHT + 1e-3 * RIGHT.tanh()).explanation is None


def test_what_comes_later_is_no_part() -> None:
    assert _test(RIGHT + _draw(9)).explanation is None
