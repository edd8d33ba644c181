"""Where the bounds of tensors come from: the sources of rounding, each with its share of the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from moeverify.errors import CaseError, Problem
from moeverify.report.console import print_fact, print_lines
from moeverify.report.finding_rows import name_tensor
from moeverify.report.numbers import format_count, format_number
from moeverify.report.sanitize import clean
from moeverify.results.bound import Bound, BoundPart
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
    "cancellation": "one unit of rounding of all tensors of its kind together: this one is far smaller",
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
        text = "no bound of this run was measured: all are exact, or the floor of the precision"
        raise CaseError([Problem(text, "--bound")])
    example = _name(known[0][1])
    raise CaseError([Problem(f"no tensor matches `{wanted}`", "--bound", remedy=f"an example: `{example}`")])


def render_bounds(found: Sequence[tuple[CaseResult, Bound]], console: Console) -> None:
    """Print the first `MOST_SHOWN` bounds with their parts; each part is a bound, and the largest decides."""
    for case, bound in found[:MOST_SHOWN]:
        widest = max(bound.parts.values())
        title = Text(f"{clean(case.name)}: ", style="dim")
        print_lines(console, title.append(clean(_name(bound)), style="bold not dim"))
        text = f"{format_number(widest)} in step {bound.step}; its error is {format_number(bound.error)}"
        print_fact(console, "bound", text, indent=2)
        for part, value in sorted(bound.parts.items(), key=lambda item: -item[1]):
            share = f"{100.0 * value / widest:.0f} %" if widest else ""
            source = _SOURCES[part].format(factor=bound.factor)
            print_fact(console, share, f"{format_number(value)}  {source}", indent=4)
    if len(found) > MOST_SHOWN:
        print_lines(console, Text(f"and {format_count(len(found) - MOST_SHOWN, 'more tensor')}", style="dim"))
    print_lines(
        console,
        Text(
            "flips of routing are in the measured errors: only the routing of the built-in model can be held",
            style="dim",
        ),
    )


def _name(bound: Bound) -> str:
    return name_tensor(bound.check, bound.tensor)
