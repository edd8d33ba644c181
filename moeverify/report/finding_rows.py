"""One finding as labelled lines, shared by the terminal, JUnit and the HTML page."""

from __future__ import annotations

from moeverify.report.numbers import format_excess, format_ranks
from moeverify.report.words.cause import (
    describe_cause,
    describe_evidence,
    describe_where,
    leads_with_culprit,
)
from moeverify.report.words.culprit import list_culprit, list_source, name_operation
from moeverify.report.words.origin import describe_lone_line, list_origins
from moeverify.report.words.run import describe_follow_up
from moeverify.results.checks import CheckName
from moeverify.results.finding import Finding
from moeverify.results.script import ScriptCheck

_COUNTED = {
    CheckName.PRECISION,
    ScriptCheck.BATCH,
    ScriptCheck.PARAMETERS,
    ScriptCheck.COPIES,
    ScriptCheck.CALLS,
}


def name_tensor(check: str, tensor: str) -> str:
    """Return `check: tensor`, or only the name if both are the same."""
    return tensor if check == tensor else f"{check}: {tensor}"


def name_finding(finding: Finding) -> str:
    """Return `check: tensor, step n`, without the step for a finding outside the steps (step -1)."""
    step = f", step {finding.step}" if finding.step >= 0 else ""
    return name_tensor(finding.check, finding.tensor) + step


def describe_finding(finding: Finding) -> list[tuple[str, str]]:
    """Return (label, text) pairs of all facts of a finding, numbers first."""
    # These checks report discrete facts, such as a wrong dtype or call order; they have no error to
    # measure.
    is_counted = finding.check in _COUNTED
    measured = [] if is_counted else [("error", format_excess(finding.error, finding.bound))]
    facts = [*measured, ("rank", _describe_rank(finding))]
    if finding.scale is not None or finding.cosine is not None:
        facts.append(("scale", _describe_scale(finding)))
    if finding.index or finding.expected is not None or finding.actual is not None:
        facts.append(("at", _describe_place(finding)))
    culprit = finding.culprit if leads_with_culprit(finding) else None
    if culprit is not None:
        facts += list_culprit(culprit)
    elif cause := describe_cause(finding):
        facts.append(("cause", cause))
    scaling = finding.culprit if culprit is None and finding.culprit and finding.culprit.multiplies else None
    if scaling is not None:
        facts.append(("seen in", name_operation(scaling.here)))
    origins = (*(finding.culprit.origins if finding.culprit is not None else ()), *finding.origins)
    if culprit is not None:
        origins = tuple(each for each in origins if each is not culprit.lone_line)
    elif finding.lone_line is not None:
        facts.append(("line", describe_lone_line(finding.lone_line)))
        origins = origins[1:]
    facts.extend(("look at", line) for line in list_origins(origins))
    if where := describe_where(finding):
        facts.append(("where", where))
    if shown := culprit or scaling:
        facts.extend(("source", line) for line in list_source(shown))
    facts.extend(("evidence", line) for line in describe_evidence(finding))
    if finding.follow_up is not None:
        facts.append(("follow-up", describe_follow_up(finding.follow_up)))
    return facts


def _describe_rank(finding: Finding) -> str:
    """Return the worst rank with its coordinates, and the range of ranks that differ."""
    text = f"{finding.rank}" + (
        f" ({describe_coordinates(finding.coordinates)})" if finding.coordinates else ""
    )
    if set(finding.ranks) - {finding.rank}:
        text += f" is worst, {format_ranks(finding.ranks)} differ"
    return text


def describe_coordinates(coordinates: dict[str, int]) -> str:
    """Return mesh coordinates as text: `dp_shard 1, ep 3`."""
    return ", ".join(f"{axis} {position}" for axis, position in coordinates.items())


def _describe_scale(finding: Finding) -> str:
    """Return scale and cosine to nine digits: a wrong divisor shows up as a round number."""
    parts = []
    if finding.scale is not None:
        parts.append(f"actual is {finding.scale:.9g} times expected")
    if finding.cosine is not None:
        parts.append(f"cosine {finding.cosine:.9g}")
    return ", ".join(parts)


def _describe_place(finding: Finding) -> str:
    """Return the global index of the largest difference, and both values there in full precision."""
    index = "[" + ", ".join(str(number) for number in finding.index) + "]" if finding.index else "the value"
    values = []
    if finding.expected is not None:
        values.append(f"expected {finding.expected!r}")
    if finding.actual is not None:
        values.append(f"actual {finding.actual!r}")
    return f"{index}: {', '.join(values)}" if values else index
