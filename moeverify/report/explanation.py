"""One finding with all of its evidence, and the place of the cause."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moeverify.errors import CaseError, Problem
from moeverify.report.console import print_fact, print_lines, style_verdict
from moeverify.report.finding_rows import describe_finding, name_finding, name_tensor
from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.sanitize import clean
from moeverify.report.sorting import order_findings
from moeverify.report.words.cause import describe_cause, describe_explanation, describe_where
from moeverify.report.words.factor import part_sources
from moeverify.report.words.run import describe_issued
from moeverify.results.facts import Facts
from moeverify.results.finding import Finding
from moeverify.results.place import Place
from moeverify.results.run import CaseResult, RunResult


@dataclass(frozen=True)
class Numbered:
    """A root finding (one that follows from no other), its case, and its number in the run."""

    number: int
    case: CaseResult
    finding: Finding


def number_findings(run: RunResult) -> list[Numbered]:
    """Return the root findings of all cases in report order, numbered from 1."""
    pairs = [
        (case, finding)
        for case in run.cases
        for finding in order_findings(case.findings)
        if not finding.follows
    ]
    return [Numbered(number, *pair) for number, pair in enumerate(pairs, start=1)]


def choose_finding(run: RunResult, wanted: str) -> Numbered:
    """Return the finding with this number, or the only one whose `check: tensor` contains all of these words.

    Raises: CaseError if no finding matches, or more than one.
    """
    numbered = number_findings(run)
    if wanted.strip().isdecimal():
        by_number = {str(item.number): item for item in numbered}
        if wanted.strip() in by_number:
            return by_number[wanted.strip()]
        remedy = f"they are 1 to {len(numbered)}" if numbered else "the run has none"
        raise CaseError([Problem(f"there is no finding {wanted.strip()}", path="FINDING", remedy=remedy)])
    hits = [item for item in numbered if _matches(item.finding, wanted)]
    exact = [item for item in hits if name_tensor(item.finding.check, item.finding.tensor) == wanted.strip()]
    if len(exact or hits) == 1:
        return (exact or hits)[0]
    if hits:
        numbers = "; ".join(f"{item.number} is {_name(item)}" for item in hits[:8])
        remedy = f"give a number: {numbers}"
        raise CaseError([Problem(f"{len(hits)} findings match `{wanted}`", path="FINDING", remedy=remedy)])
    raise CaseError([Problem(f"no finding matches `{wanted}`", path="FINDING", remedy=_advise(run, wanted))])


def _advise(run: RunResult, wanted: str) -> str:
    """Return a suggestion for a finding that was not found."""
    for case in run.cases:
        for finding in case.findings:
            if finding.follows and _matches(finding, wanted):
                return f"{name_finding(finding)} follows from {finding.follows}: ask for that one"
    names = {_name(item): item.number for item in number_findings(run)}
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.4)
    return f"did you mean {names[close[0]]}, {close[0]}?" if close else "`moeverify explain RUN` lists all"


def _matches(finding: Finding, wanted: str) -> bool:
    name = name_finding(finding).lower()
    return all(word in name for word in wanted.lower().split())


def _name(item: Numbered) -> str:
    return name_finding(item.finding)


def render_list(run: RunResult, console: Console, path: Path) -> None:
    """Print every root finding with its number, cause and place; `path` is the run to name in the hint."""
    numbered = number_findings(run)
    if not numbered:
        print_lines(console, Text("nothing differs: there is no finding to explain"))
        return
    for item in numbered:
        if item.number == 1 or numbered[item.number - 2].case is not item.case:
            followers = len([found for found in item.case.findings if found.follows])
            title = Text.assemble((clean(item.case.name), "bold"), "  ", style_verdict(item.case.verdict))
            print_lines(
                console, title.append(f"  {format_count(followers, 'more finding')} follow from these")
            )
        print_lines(console, Text(f"  {item.number}  {clean(_name(item))}", style="bold"))
        if cause := describe_cause(item.finding):
            print_fact(console, "cause", cause, indent=5, style="yellow")
        if where := describe_where(item.finding):
            print_fact(console, "where", where, indent=5)
    console.print()
    print_lines(console, Text(f"next, all evidence of one: moeverify explain {path} 1", style="dim"))


def render_explanation(item: Numbered, num_findings: int, console: Console) -> None:
    """Print one finding with all known facts and the tests of its diagnosis."""
    finding = item.finding
    title = Text(f"finding {item.number} of {num_findings}, {clean(item.case.name)}: ", style="dim")
    print_lines(console, title.append(clean(_name(item)), style="bold not dim"))
    for label, text in (("recipe", item.case.recipe), ("layout", item.case.layout)):
        if text:
            print_fact(console, label, text, indent=2)
    _print_facts(describe_finding(finding), console)
    if finding.place is not None:
        _print_facts(_describe_place(finding.place, finding.facts), console)
    _print_facts([("rival", describe_explanation(rival)) for rival in finding.rivals], console)
    followers = [found for found in item.case.findings if found.follows == finding.tensor]
    if followers:
        print_fact(console, "follow", format_count(len(followers), "finding"), indent=2)


def _print_facts(facts: Sequence[tuple[str, str]], console: Console) -> None:
    previous = ""
    for label, text in facts:
        style = "yellow" if label == "cause" else ""
        print_fact(console, "" if label == previous else label, text, indent=2, style=style)
        previous = label


def _describe_place(place: Place, facts: Facts | None) -> list[tuple[str, str]]:
    rows = [("module", place.module)] if place.module else []
    rows += [("wrong on", format_ranks(place.ranks))] if place.ranks else []
    axes, others = part_sources(place.axes)
    rows += [(label, ", ".join(names)) for label, names in (("axes", axes), ("counts", others)) if names]
    return rows + [("issued", line) for line in describe_issued(place, facts)]
