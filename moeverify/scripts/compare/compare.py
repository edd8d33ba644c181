"""Verdict and findings of two recorded runs: required equalities first, then the first difference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moeverify.errors import FormatError
from moeverify.parallel.regions.observer import INITIAL
from moeverify.report.words.script import (
    describe_bounds,
    describe_early_end,
    describe_layout,
    describe_mixed_passes,
    describe_note,
    describe_remedies,
    describe_scope,
    describe_steps,
    describe_uncompared,
    describe_undecided,
    describe_unequal_start,
)
from moeverify.results.checks import CheckName, Kind
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult
from moeverify.results.script import ScriptCheck
from moeverify.scripts.compare.batch import count_inputs, find_other_rows
from moeverify.scripts.compare.calls import find_wrong_calls
from moeverify.scripts.compare.code import ScriptCode
from moeverify.scripts.compare.copies import find_copies
from moeverify.scripts.compare.entries import Comparer
from moeverify.scripts.compare.float_rows import add_float_rows
from moeverify.scripts.compare.limits import (
    UNITS,
    Precision,
    are_undecided,
    list_row_bounds,
    make_bounds,
    measure_rounding,
    set_aside,
    shows_noise_of,
)
from moeverify.scripts.compare.options import find_other_options, find_other_parameters
from moeverify.scripts.compare.outputs import OutputComparer, judge_outputs, list_spots
from moeverify.scripts.compare.places import Places, find_places, find_repeated_parts
from moeverify.scripts.compare.sites import add_sites
from moeverify.scripts.record.lines import REDUCES
from moeverify.scripts.record.read import RecordedRun
from moeverify.verification.checks.base import CheckOutcome, ComparedTensors, make_outcome
from moeverify.verification.checks.golden_tensors import GoldenTensors
from moeverify.verification.checks.replicas import Replicas
from moeverify.verification.compare.assembled import Assembled, Key, assemble
from moeverify.verification.compare.comparison import ComparedShard
from moeverify.verification.golden.noise import noise_key

_ORDER = {CheckName.ACTIVATIONS.value: -1, **{kind.value: number for number, kind in enumerate(Kind)}}
_KINDS = (Kind.GRADIENT, Kind.UPDATE)  # for every parameter; the moments depend on the optimizer
_TENSOR_CHECKS = (
    GoldenTensors(CheckName.INITIAL_STATE, (Kind.INITIAL_WEIGHT,), exact=True),
    GoldenTensors(CheckName.ACTIVATIONS, (CheckName.ACTIVATIONS,)),
    GoldenTensors(CheckName.GRADIENT, (Kind.GRADIENT,)),
    GoldenTensors(CheckName.GRADIENT_NORM, (Kind.GRADIENT_NORM,)),
    GoldenTensors(CheckName.UPDATE, (Kind.UPDATE,)),
    GoldenTensors(CheckName.OPTIMIZER_STATE, (Kind.OPTIMIZER_STATE,)),
)


OnPart = Callable[[int, int], None]


def compare_runs(
    expected: RecordedRun,
    actual: RecordedRun,
    noise: RecordedRun | None = None,
    on_part: OnPart = lambda *_: None,
) -> CaseResult:
    """Return the verdict on `actual`, compared with `expected`; `noise` is a nudged second run of `expected`.

    `on_part` receives how many comparisons of steps are done, and how many there are.
    Raises: FormatError when the runs have no step in common, or when `expected` has no whole tensors.
    """
    started = time.monotonic()
    steps = [step for step in expected.steps if step in actual.steps]
    _check_comparable(expected, actual, steps)
    places = find_places(expected, actual)
    comparer = Comparer(expected, actual, places)
    precision = _find_precision(expected, actual)
    measured = noise if noise is not None and shows_noise_of(noise, precision) else None
    noise_by_key = _measure_noise(expected, measured, steps)
    bounds = make_bounds(precision, noise_by_key, steps[0], measure_rounding(expected))
    outcomes = _check_script(expected, actual, places, steps, precision)
    outputs = OutputComparer(expected, actual)
    tensors = _assemble(comparer, outputs, steps, on_part)
    num_compared = sum(kind not in {Kind.OPTIMIZER_STATE, CheckName.ACTIVATIONS} for _, kind, _ in tensors)
    outcomes += _check_tensors(ComparedTensors(_coordinates(actual), tensors, bounds))
    outcomes = _judge_outputs(outputs, outcomes, tensors, steps[0], UNITS[bounds.precision])
    found = [finding for outcome in outcomes for finding in outcome.findings]
    # Copies that `--weights` has replaced explain no difference of this run.
    apart = [finding for finding in found if finding.check == ScriptCheck.COPIES and actual.has_other_weights]
    explained = _explain(comparer, [finding for finding in found if finding not in apart], precision)
    findings = [_name_unequal_start(add_sites(actual, each), places, actual) for each in (*apart, *explained)]
    results = [outcome.result for outcome in outcomes]
    undecided: Sequence[Finding] = ()
    if precision == "mixed" and measured is None and are_undecided(findings):
        results = [set_aside(result, findings) for result in results]
        undecided, findings = findings, []
    return CaseResult(
        name=f"{actual.folder.name} against {expected.folder.name}",
        file="",
        verdict="mismatch" if findings else "pass",
        ranks=actual.world_size,
        seconds=time.monotonic() - started,
        layout=describe_layout(
            expected.world_size,
            actual.world_size,
            steps,
            num_tensors=len({each.name for each in places.known.values()}),
            num_whole=len(places.replicated(actual.world_size)),
        ),
        checks=tuple(results),
        findings=tuple(map(ScriptCode(expected, actual).add_origins, findings)),
        losses=tuple((_mean_loss(expected, step), _mean_loss(actual, step)) for step in steps),
        notes=(
            *describe_undecided(undecided),
            *_list_notes(expected, actual, num_compared, _count_tensors(places, steps)),
            *describe_remedies(findings, expected.world_size),
            *describe_bounds(precision, is_given=noise is not None, is_measured=measured is not None),
        ),
    )


def _judge_outputs(
    outputs: OutputComparer,
    outcomes: Sequence[CheckOutcome],
    tensors: Mapping[Key, Assembled],
    first: int,
    unit: float,
) -> list[CheckOutcome]:
    """Return the outcomes with module outputs evaluated against each other.

    A difference within its bound locates an error but is no error itself. It counts only at steps whose
    gradients differ.
    """
    wrong = {
        finding.step
        for outcome in outcomes
        for finding in outcome.findings
        if finding.check == CheckName.GRADIENT
    }
    labels = frozenset(name for _, kind, name in tensors if kind == CheckName.ACTIVATIONS)
    spots = list_spots(outputs.expected, first)

    def find_jumps(step: int) -> frozenset[str]:
        return outputs.find_jumps(step, unit) if step in wrong else frozenset()

    return [
        judge_outputs(outcome, spots, labels, find_jumps)
        if outcome.result.name == CheckName.ACTIVATIONS
        else outcome
        for outcome in outcomes
    ]


def _check_comparable(expected: RecordedRun, actual: RecordedRun, steps: Sequence[int]) -> None:
    if not steps:
        have = ", ".join(
            describe_steps(str(run.folder), run.steps, run.num_steps) for run in (expected, actual)
        )
        raise FormatError(
            f"the runs have no recorded step in common: {have}", "record the same --steps of both"
        )
    if expected.ambiguous:
        first = expected.ambiguous[0]
        raise FormatError(
            f"{expected.folder}: `{first}` differs between its ranks from the start, and nothing says which part "
            "of it each of them has",
            "give the run of one device as RUN_A",
        )


def _check_script(
    expected: RecordedRun, actual: RecordedRun, places: Places, steps: list[int], precision: Precision
) -> list[CheckOutcome]:
    """Return the outcomes of the checks that precede any comparison of tensors."""
    drawn = add_float_rows(expected, actual, list_row_bounds(precision, steps))
    options = list(find_other_options(expected, actual, places, steps))
    num_options = len({name for group in actual.ranks[0].options for name in group.options})
    num_calls = sum(len(rank.calls) for rank in actual.ranks)
    found: list[tuple[ScriptCheck, list[Finding], int]] = [
        (
            ScriptCheck.BATCH,
            list(find_other_rows(*drawn, steps)),
            count_inputs(*drawn, steps),
        ),
        (ScriptCheck.PARAMETERS, list(find_other_parameters(expected, places)), len(expected.names)),
        # A schedule that steps too often changes the learning rate; the calls are then the cause.
        (ScriptCheck.CALLS, list(find_wrong_calls(expected, actual, steps)), num_calls),
        (ScriptCheck.OPTIONS, options, num_options),
        (ScriptCheck.COPIES, list(find_copies(expected, actual, places)), len(expected.names)),
    ]
    outcomes = [make_outcome(check, findings, number) for check, findings, number in found]
    num_names = len({each.name for each in places.known.values()})
    return [*outcomes, make_outcome(CheckName.COVERAGE, list(find_repeated_parts(places)), num_names)]


def _check_tensors(compared: ComparedTensors) -> list[CheckOutcome]:
    # Replicas of gradients may be sums in another order. Only the weights must stay equal.
    weights = Replicas().compare(_only(compared, Kind.UPDATE))
    outcomes = [*(check.compare(compared) for check in _TENSOR_CHECKS), weights]
    return [outcome for outcome in outcomes if outcome is not None]


def _assemble(
    comparer: Comparer, outputs: OutputComparer, steps: Sequence[int], on_part: OnPart = lambda *_: None
) -> dict[Key, Assembled]:
    by_rank: list[list[ComparedShard]] = [[] for _ in comparer.actual.ranks]
    parts = [comparer.compare_tensors(INITIAL, Kind.INITIAL_WEIGHT)]
    for num_done, step in enumerate(steps):
        on_part(num_done, len(steps))
        parts.append(outputs.compare(step))
        parts += [comparer.compare_tensors(step, kind) for kind in (*_KINDS, Kind.OPTIMIZER_STATE)]
        parts.append(comparer.compare_numbers(step))
    for part in parts:
        for own, entries in zip(by_rank, part, strict=True):
            own.extend(entries)
    return assemble(by_rank, _ORDER)


def _count_tensors(places: Places, steps: Sequence[int]) -> int:
    """Return the number of logical tensors to compare, plus the clip coefficient of each step."""
    num_names = len({each.name for each in places.known.values()})
    return num_names * (1 + len(_KINDS) * len(steps)) + len(steps)


def _only(compared: ComparedTensors, kind: str) -> ComparedTensors:
    return replace(compared, tensors={key: each for key, each in compared.tensors.items() if key[1] == kind})


def _coordinates(run: RecordedRun) -> dict[int, dict[str, int]]:
    return {rank.rank: {} for rank in run.ranks}


def _find_precision(*runs: RecordedRun) -> Precision:
    dtypes = {
        line.dtype
        for run in runs
        for rank in run.ranks
        for (_, kind, _), line in rank.values.items()
        if kind == Kind.GRADIENT and line.dtype
    }
    noted = {note.text for run in runs for rank in run.ranks for note in rank.notes if note.about == "dtype"}
    if noted or dtypes - {"float32", "float64"}:
        return "mixed"
    return "float64" if dtypes == {"float64"} else "float32"


def _measure_noise(
    expected: RecordedRun, noise: RecordedRun | None, steps: Sequence[int]
) -> dict[str, float] | None:
    """Return the relative errors between a nudged run of one device and the run itself, by `noise_key`."""
    if noise is None:
        return None
    comparer = Comparer(expected, noise, find_places(expected, noise))
    measured: dict[str, float] = {}
    for (step, kind, name), tensor in _assemble(comparer, OutputComparer(expected, noise), steps).items():
        error = tensor.difference.relative_error
        measured[noise_key(step, kind, name)] = error if math.isfinite(error) else 0.0
    return measured


def _explain(comparer: Comparer, findings: list[Finding], precision: str) -> list[Finding]:
    """Return the findings with causes: broken equalities first, and numeric ones as consequences."""
    if not findings:
        return []
    begins = [finding for finding in findings if finding.check in {*ScriptCheck, CheckName.COVERAGE}]
    begins += [finding for finding in findings if finding.check == CheckName.INITIAL_STATE][:1]
    numeric = [finding for finding in findings if finding not in begins]
    first = min((finding.step for finding in numeric if finding.step >= 0), default=None)
    if begins and (first is None or min(finding.step for finding in begins) <= first):
        head = min(begins, key=lambda finding: finding.step)
        return begins + [finding.model_copy(update={"follows": head.tensor}) for finding in numeric]
    at_first = [finding for finding in numeric if finding.step == first]
    gradients = [finding for finding in at_first if finding.check == CheckName.GRADIENT]
    forward = [finding for finding in at_first if finding.explanation is not None]
    assert first is not None
    if forward:  # hypotheses on gradients are not tested if the outputs of modules differ already
        origins = forward
    elif gradients:
        # Runs that match need none of the hypotheses, whose modules take as long to load as torch.
        from moeverify.scripts.compare.explain import explain_gradients

        origins = explain_gradients(comparer, gradients, first, is_mixed=precision == "mixed")
    else:
        origins = [_explain_number(comparer, at_first[0], first)]
    head = origins[0]
    known = {(finding.check, finding.tensor, finding.step) for finding in origins}
    rest = [each for each in numeric if (each.check, each.tensor, each.step) not in known]
    later = [each.model_copy(update={"follows": head.tensor}) for each in (*rest, *begins)]
    return origins + later


def _name_unequal_start(finding: Finding, places: Places, run: RecordedRun) -> Finding:
    """Return a finding of initial weights with its cause, if only some replicas differ from the other run."""
    if finding.check != CheckName.INITIAL_STATE or finding.follows or finding.is_explained:
        return finding
    is_part = 0 < len(finding.ranks) < run.world_size and finding.tensor in places.replicated(run.world_size)
    return finding.model_copy(update={"cause": describe_unequal_start(finding.ranks)}) if is_part else finding


def _explain_number(comparer: Comparer, finding: Finding, step: int) -> Finding:
    if finding.check != CheckName.GRADIENT_NORM:
        return finding
    from moeverify.scripts.compare.explain import explain_norm

    return finding.model_copy(update={"facts": explain_norm(comparer, step, finding.rank)})


def _mean_loss(run: RecordedRun, step: int) -> float:
    """Return the sum of a step's losses at the start of backward passes, averaged over ranks."""
    totals = [
        sum(loss for call in rank.calls if call.step == step for loss in call.losses) for rank in run.ranks
    ]
    return sum(totals) / len(totals)


def _list_notes(
    expected: RecordedRun, actual: RecordedRun, num_compared: int, num_tensors: int
) -> tuple[str, ...]:
    """Return notes for the reader of the verdict."""
    has_outputs = [any(rank.outputs for rank in run.ranks) for run in (expected, actual)]
    notes = [describe_scope(has_outputs)]
    found = {note.about for run in (expected, actual) for rank in run.ranks for note in rank.notes}
    has_states = "replay" in found and "mixed" not in found
    for name, run in (("RUN_A", expected), ("RUN_B", actual)):
        last = run.ranks[0].header.last
        if run.steps[-1] < last:
            notes.append(describe_early_end(name, run.steps[-1], last))
        for about in ("model", "dropout", "stopped", "bypass", "replay", REDUCES):
            if about == "dropout" and has_states:
                continue
            texts = {note.text: rank.rank for rank in run.ranks for note in rank.notes if note.about == about}
            notes += [describe_note(about, name, text, rank) for text, rank in texts.items()]
    notes += [describe_mixed_passes()] if "mixed" in found else []
    notes += [] if num_compared >= num_tensors else [describe_uncompared(num_tensors - num_compared)]
    return tuple(notes)
