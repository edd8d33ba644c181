"""Observations in words, one line per kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from moeverify.report.numbers import format_count, format_number, format_ranks
from moeverify.report.words.factor import format_factor
from moeverify.report.words.part import name_contributions
from moeverify.report.words.subject import MODEL
from moeverify.results.factor import is_same
from moeverify.results.observation import (
    AmbiguousCount,
    DiagnosisFailed,
    FirstDivergence,
    FitResult,
    HiddenByRounding,
    KeptElements,
    LargestValue,
    NoValues,
    OtherLosses,
    OtherPasses,
    RankValues,
    RelativeError,
    ReplicaSum,
    RightAlike,
    ScalarValues,
    TriedOrders,
    WrongElements,
)

_MOST_COEFFICIENTS = 8
_MOST_VALUES = 4


@singledispatch
def describe_observation(seen: object) -> str:
    """Return one line about a measurement."""
    raise TypeError(f"there are no words for {type(seen).__name__}")


def describe_residual(residual: float) -> str:
    """Return the residual of a fit in words."""
    return f"relative fit residual {residual:.2g}"


@describe_observation.register
def _(seen: FitResult) -> str:
    residual = describe_residual(seen.residual)
    if len(seen.contributions) == 1:
        return residual
    named = name_contributions(seen.contributions)
    shown = [f"{name} {format_factor(value)}" for name, value in named.items()]
    left_out = len(shown) - _MOST_COEFFICIENTS
    more = f", and {left_out} more" if left_out > 0 else ""
    return f"coefficients {', '.join(shown[:_MOST_COEFFICIENTS])}{more}; {residual}"


@describe_observation.register
def _(seen: ReplicaSum) -> str:
    over = f" over {seen.axis}" if seen.axis else ""
    total = (
        "the expected value"
        if is_same(seen.factor, 1.0)
        else f"{format_factor(seen.factor)}x the expected value"
    )
    return f"the {seen.num_replicas} replicas{over} sum to {total}"


@describe_observation.register
def _(seen: LargestValue) -> str:
    absent = f"; absent on {format_ranks(seen.absent_on)}" if seen.absent_on else ""
    return f"largest absolute value {seen.actual:.3g}, expected {seen.expected:.3g}{absent}"


@describe_observation.register
def _(seen: ScalarValues) -> str:
    name = f"{seen.name}: " if seen.name else ""
    rank = f" on rank {seen.rank}" if seen.rank is not None else ""
    return f"{name}expected {seen.expected:.10g}, actual {seen.actual:.10g}{rank}"


@describe_observation.register
def _(seen: RankValues) -> str:
    values = ", ".join(f"{value:.10g}" for value in seen.values[:_MOST_VALUES])
    left_out = len(seen.values) - _MOST_VALUES
    return f"ranks disagree: {values}" + (f", and {left_out} more" if left_out > 0 else "")


@describe_observation.register
def _(seen: RelativeError) -> str:
    units = ", ".join(f"{dtype} {unit:.2g}" for dtype, unit in seen.units.items())
    return f"relative error {seen.error:.3g}" + (f"; units of rounding: {units}" if units else "")


@describe_observation.register
def _(seen: FirstDivergence) -> str:
    right = f"{seen.num_right} readings match to {format_number(seen.worst_right)}"
    end = f"{'gradient of the ' if seen.direction == 'backward' else ''}{seen.end} of {seen.module or MODEL}"
    at = f" at {seen.num_wrong} of {seen.num_tokens} tokens" if 0 < seen.num_wrong < seen.num_tokens else ""
    where = f"{at} on {format_ranks(seen.ranks)}"
    return f"{end} is off by {seen.error:.3g}{where}; before it {right}"


@describe_observation.register
def _(seen: TriedOrders) -> str:
    giving = f"{seen.num_giving} of them {'give' if seen.num_giving > 1 else 'gives'}"
    return f"{format_count(seen.num_tried, 'order')} of the right values tried, {giving} every value"


@describe_observation.register
def _(seen: KeptElements) -> str:
    return f"{seen.num_kept} of {seen.num_elements} elements are wrong and as they were before the load"


@describe_observation.register
def _(seen: WrongElements) -> str:
    return f"{seen.num_wrong} of {seen.num_elements} elements differ"


@describe_observation.register
def _(seen: RightAlike) -> str:
    return f"{seen.num_right} of the {seen.num_alike} gradients with the same placement on {seen.axis} match"


@describe_observation.register
def _(seen: HiddenByRounding) -> str:
    return f"rounding of {seen.precision} hides causes: --set recipe.precision=float64 names them"


@describe_observation.register
def _(seen: OtherPasses) -> str:
    counts = f"{_describe_passes(seen.expected)} in RUN_A, {_describe_passes(seen.actual)} in RUN_B"
    if seen.expected == seen.actual:
        remedy = "each with the rows of one pass of RUN_B"
    else:
        remedy = f"of {' and '.join(map(str, sorted(set(seen.actual))))} rows each"
    again = f"record RUN_A again with passes {remedy}, and compare with that"
    return f"forward passes of step {seen.step}: {counts}; {again}"


@describe_observation.register
def _(seen: OtherLosses) -> str:
    where = f"on rank {seen.rank}" if seen.rank is not None else "in RUN_B"
    numbers = f"the loss of step {seen.step} is {seen.expected:.7g} in RUN_A and {seen.actual:.7g} {where}"
    if seen.has_outputs or not seen.differ:
        return numbers
    return f"{numbers}; record both runs with --outputs to find the first module that differs"


@describe_observation.register
def _(seen: AmbiguousCount) -> str:
    command = (
        f"moeverify watch --steps 0 --out RUN_C -- torchrun --nproc-per-node {seen.num_ranks} {seen.script}"
    )
    return (
        f"ranks and micro-batches are both {seen.num_ranks}: record RUN_B again with another number of micro-batches "
        f"(`{command}` with the option of the script), and compare; a factor that stays comes from the ranks"
    )


def _describe_passes(sizes: Sequence[int]) -> str:
    counts = [f"{sizes.count(size)} of {format_count(size, 'row')}" for size in dict.fromkeys(sizes)]
    return " and ".join(counts)


@describe_observation.register
def _(seen: NoValues) -> str:
    return (
        "no cause was searched for: the golden has sketches and no values; a smaller case with whole tensors, "
        "without --sketch, finds the cause"
    )


@describe_observation.register
def _(seen: DiagnosisFailed) -> str:
    raised = f"{seen.error} at {seen.site}: " if seen.error else ""
    return (
        f"the diagnosis failed, so causes may be missing; checks and findings are complete "
        f"({raised}{seen.message})"
    )
