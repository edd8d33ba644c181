"""Where the bounds of tensors come from: the sources of rounding, each with its share of the bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from moeverify.errors import CaseError, Problem
from moeverify.report.console import print_fact, print_lines
from moeverify.report.finding_rows import name_tensor
from moeverify.report.numbers import format_count, format_number
from moeverify.report.sanitize import clean
from moeverify.results.bound import Bound, BoundPart, NearChoices, PerturbedRun
from moeverify.results.run import CaseResult, RunResult

MOST_SHOWN = 12

_SOURCES: Mapping[BoundPart, str] = {
    "exact": "equal bits are required",
    "fixed": "the tolerance of the case",
    "floor": "a few units of rounding of the precision",
    "measured": "{factor:g} x the largest error of this tensor over the perturbed runs of one device",
    "typical": "{factor:g} x the median of that error over the tensors of its kind",
    "narrow parts": "{factor:g} x the effect of moved roundings in parts below float64",
    "sign flips": "elements whose update changes its sign within {factor:g} x the noise of their gradient",
    "squares": "{factor:g} x the noise of the gradient, which a second moment squares",
    "cancellation": "one unit of rounding of all tensors of its kind together: this one is far smaller",
    "module": "{factor:g} x the error of one device's module, given the rank's inputs",
    "recomputed": "the rounding of a result recomputed from the rank's own values, from its formula",
}

_RUNS: Mapping[PerturbedRun, str] = {
    "plain": "the plain run",
    "other order": "the run with rows in another order",
    "micro-batches": "the run in two micro-batches",
    "moved weights": "the run with initial weights off by one unit in the last place",
    "float8": "the run with other roundings to float8",
    "own choices": "the run with its own choices near a tie",
}


def choose_bounds(run: RunResult, wanted: str) -> list[tuple[CaseResult, Bound]]:
    """Return the bounds of the tensors whose `check: tensor` contains all of these words, the widest first.

    Raises: CaseError if there is none.
    """
    words = wanted.lower().split()
    known = [(case, bound) for case in run.cases for bound in case.bounds]
    found = [pair for pair in known if all(word in _name(pair[1]).lower() for word in words)]
    if found:
        return sorted(found, key=lambda pair: -max(pair[1].parts.values()))
    if not known:
        text = "no check of this run has bounds: all are exact"
        raise CaseError([Problem(text, path="--bound")])
    example = _name(known[0][1])
    raise CaseError(
        [Problem(f"no tensor matches `{wanted}`", path="--bound", remedy=f"an example: `{example}`")]
    )


def render_bounds(found: Sequence[tuple[CaseResult, Bound]], console: Console) -> None:
    """Print the first `MOST_SHOWN` bounds with their parts; each part is a bound, and the largest decides."""
    shown = found[:MOST_SHOWN]
    for case, bound in shown:
        title = Text(f"{clean(case.name)}: ", style="dim")
        print_lines(console, title.append(clean(_name(bound)), style="bold not dim"))
        _render_parts(bound, console)
    if len(found) > MOST_SHOWN:
        print_lines(console, Text(f"and {format_count(len(found) - MOST_SHOWN, 'more tensor')}", style="dim"))
    for case in {each.name: each for each, bound in shown if "measured" in bound.parts}.values():
        if case.choices is not None:
            text = f"{clean(case.name)}: {_describe_choices(case.choices)}"
            print_lines(console, Text(text, style="dim"))


def _render_parts(bound: Bound, console: Console) -> None:
    widest = max(bound.parts.values())
    error = "" if bound.error is None else f"; the error is {format_number(bound.error)}"
    text = f"{format_number(widest)} in step {bound.step}, the largest of these{error}"
    print_fact(console, "bound", text, indent=2)
    for part, value in sorted(bound.parts.items(), key=lambda item: -item[1]):
        share = f"{100.0 * value / widest:.0f} %" if 0.0 < widest < math.inf else ""
        source = _SOURCES[part].format(factor=bound.factor)
        print_fact(console, share, f"{format_number(value)}  {source}", indent=4)
        for line in _describe_measured(bound) if part == "measured" else ():
            print_fact(console, "", line, indent=6)


def _describe_measured(bound: Bound) -> Iterator[str]:
    if bound.run is not None:
        yield f"largest in {_RUNS[bound.run]}"
    if bound.plain is not None and bound.run != "plain":
        yield f"{format_number(bound.plain)} in {_RUNS['plain']}, by the precision alone"
    if bound.stored:
        yield f"{format_number(bound.stored)} by rounding the right weight, after the update, to its dtype"


def _describe_choices(choices: NearChoices) -> str:
    if choices.is_replayed:
        return "no flip of routing is in measured errors: these runs replay the routing of the float64 run"
    held = format_count(choices.num_held, "choice")
    if choices.num_free:
        free = format_count(choices.num_free, "choice")
        return f"flips of {free} near a tie may be in measured errors; {held} were those of the float64 run"
    return f"no flip of routing is in measured errors: {held} near a tie were those of the float64 run"


def _name(bound: Bound) -> str:
    return name_tensor(bound.check, bound.tensor)
