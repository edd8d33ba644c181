"""The evidence behind a cause: every test that a wrong tensor was put to, and what each said.

A cause is named by the first test that explains the numbers. A reader who doubts it wants to see that the
others do not, so here all are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moeverify.diagnose.axes import Axes
from moeverify.diagnose.evidence import EXACT, Suspect, measure_distance, measure_factor
from moeverify.diagnose.first_divergence import Search
from moeverify.diagnose.permutation import count_matches, examine_places
from moeverify.diagnose.replicas import ReplicaSum, sum_replicas
from moeverify.diagnose.rounding import describe_rounding, examine_rounding
from moeverify.diagnose.verdict import list_ranks
from moeverify.results.finding import Trial
from moeverify.train.module_taps import BACKWARD, FORWARD


def list_trials(
    suspect: Suspect,
    axes: Axes,
    fits: Sequence[Trial],
    earlier: Mapping[str, Tensor | None],
    stale: bool | None,
) -> tuple[Trial, ...]:
    """Return every test of one tensor.

    `fits` are the fits on the golden's parts that were made already. `earlier` has, by what it is called, the
    golden's value at another time, None where there was none; `stale` says whether a module computes with the
    weights of a step earlier, None where that could not be tried.
    """
    return (
        _try_zero(suspect),
        *(fits or (_try_factor(suspect),)),
        *(_describe_sum(each) for each in sum_replicas(suspect, axes.groups_of(suspect.name))),
        _try_places(suspect),
        *(_try_earlier(suspect, what, value) for what, value in earlier.items()),
        *([_describe_stale(stale)] if stale is not None else []),
        _try_rounding(suspect),
    )


def describe_search(search: Search | None) -> tuple[Trial, ...]:
    """Return where the modules' outputs and their gradients first differ."""
    if search is None:
        words = "modules are not compared: rounding of bfloat16 hides where it began, and there is no step -1"
        return (Trial(name="first divergent module", verdict="untried", words=words),)
    return tuple(_describe_direction(search, direction) for direction in (FORWARD, BACKWARD))


def _describe_direction(search: Search, direction: str) -> Trial:
    name = f"first divergent module, {direction}"
    right, worst = search.num_right[direction], search.worst_right[direction]
    origin = search.origins.get(direction)
    before = f"{right} readings are right to {worst:.2g}"
    if origin is None:
        return Trial(name=name, verdict="no", words=before)
    words = f"{origin.name} is off by {origin.error:.3g} on {list_ranks(origin.ranks)}; before it {before}"
    return Trial(name=name, verdict="yes", words=words, residual=origin.error)


def _try_zero(suspect: Suspect) -> Trial:
    name = "absent or zero"
    absent = [piece.rank for piece in suspect.pieces if piece.local is None]
    largest = float(suspect.whole().abs().max()) if suspect.expected.numel() else 0.0
    golden = float(suspect.expected.abs().max()) if suspect.expected.numel() else 0.0
    if golden == 0.0:
        return Trial(name=name, verdict="untried", words="the golden is zero itself")
    if absent:
        return Trial(name=name, verdict="yes", words=f"there is none on {list_ranks(absent)}")
    verdict = "yes" if largest == 0.0 else "no"
    return Trial.model_validate(
        {
            "name": name,
            "verdict": verdict,
            "words": f"the largest value is {largest:.3g}, {golden:.3g} expected",
        }
    )


def _try_factor(suspect: Suspect) -> Trial:
    factor, residual = measure_factor(suspect)
    if factor is None:
        return Trial(name="one factor", verdict="untried", words="the golden is zero")
    return Trial(
        name="one factor",
        verdict="yes" if residual < EXACT else "no",
        words=f"{residual:.2g} of the tensor is left",
        coefficients={"golden": factor},
        residual=residual,
    )


def _describe_sum(found: ReplicaSum) -> Trial:
    name = f"sum of the replicas over {found.axis}"
    if found.factor is not None:
        words = f"the sum of {found.size} is {found.factor:.6g} times the golden"
        return Trial(
            name=name,
            verdict="yes" if found.explains else "no",
            words=words,
            coefficients={"golden": found.factor},
            residual=found.residual,
        )
    untried = found.residual is None
    return Trial(name=name, verdict="untried" if untried else "no", words=found.why, residual=found.residual)


def _try_places(suspect: Suspect) -> Trial:
    name = "right values in other places"
    verdict = examine_places(suspect)
    if verdict is not None:
        return Trial(name=name, verdict="yes", words=verdict.sentence)
    counts = []
    actual = suspect.whole()
    for dim in range(actual.ndim):
        found = count_matches(suspect.expected, actual, dim)
        if found is not None:
            counts.append(f"{found} of {actual.shape[dim]} slices along dim {dim}")
    if not counts:
        return Trial(name=name, verdict="untried", words="too small, or too large, to tell slices apart")
    return Trial(name=name, verdict="no", words=f"{', '.join(counts)} equal one of the golden's")


def _try_earlier(suspect: Suspect, what: str, value: Tensor | None) -> Trial:
    if value is None or value.numel() != suspect.expected.numel():
        return Trial(name=what, verdict="untried", words="there is none")
    error, right = measure_distance(suspect, value)
    if right < EXACT:
        return Trial(name=what, verdict="untried", words="it is equal to the right value")
    verdict = "yes" if error < EXACT else "no"
    return Trial.model_validate(
        {"name": what, "verdict": verdict, "words": f"it is off from that by {error:.3g}", "residual": error}
    )


def _describe_stale(stale: bool) -> Trial:
    words = "the weights of a step earlier give " + ("this very output" if stale else "another output")
    return Trial.model_validate(
        {"name": "weights of a step earlier", "verdict": "yes" if stale else "no", "words": words}
    )


def _try_rounding(suspect: Suspect) -> Trial:
    verdict = examine_rounding([suspect])
    if verdict is not None:
        return Trial(name="rounding of a lower precision", verdict="yes", words=verdict.sentence)
    return Trial(name="rounding of a lower precision", verdict="no", words=describe_rounding(suspect))
