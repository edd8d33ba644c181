"""The short JSON of a run: verdict, cause, lines, evidence and next commands in less than 4 kB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moeverify.report.explanation import Numbered, number_findings
from moeverify.report.failed_ranks import find_reason
from moeverify.report.next_steps import Kept, advise
from moeverify.report.sorting import count_verdicts
from moeverify.report.words.cause import describe_cause, describe_evidence, describe_where
from moeverify.report.words.origin import describe_relation
from moeverify.results.brief import MOST_BYTES, Brief, BriefCase, BriefFinding, NextStep
from moeverify.results.culprit import CodeLine, Culprit, Operation, Origin
from moeverify.results.run import SCHEMA_VERSION, CaseResult, RunResult


@dataclass(frozen=True)
class _Limits:
    """The most items of a run, and the most characters of a text."""

    cases: int
    findings: int
    items: int
    lines: int
    characters: int


# From much to little: the first that fits is taken. The first is for one finding alone.
_LIMITS = (
    _Limits(1, 1, 8, 16, 1000),
    _Limits(8, 3, 4, 8, 500),
    _Limits(4, 2, 3, 6, 400),
    _Limits(3, 1, 3, 6, 300),
    _Limits(2, 1, 2, 4, 250),
    _Limits(1, 1, 2, 2, 200),
)


def format_brief(run: RunResult, kept: Kept, only: Numbered | None = None) -> str:
    """Return a run, or the finding `only`, as JSON of less than 4 kB; `kept` is where the run is stored."""
    texts = (
        _make_brief(run, kept, only, limits).model_dump_json(exclude_defaults=True)
        for limits in _LIMITS[only is None :]
    )
    text = next((text for text in texts if len(text.encode()) < MOST_BYTES), "")
    # Only commands with very long options are left to cut.
    return (
        text or _make_brief(run, Kept(), only, _LIMITS[-1]).model_copy(update={"next": ()}).model_dump_json()
    )


def _make_brief(run: RunResult, kept: Kept, only: Numbered | None, limits: _Limits) -> Brief:
    numbered = [only] if only is not None else number_findings(run)
    # Cases that failed come before those that did not decide or did not run.
    open_ones = sorted(
        (case for case in run.cases if case.verdict != "pass"), key=lambda case: not case.has_failed
    )
    wanted = [only.case] if only is not None else open_ones
    told = [_tell_case(case, numbered, limits) for case in wanted[: limits.cases]]
    steps: list[NextStep] = []
    if wanted:
        own = [item.number for item in numbered if item.case is wanted[0]]
        pairs = advise(wanted[0], run.command, kept, own[0] if own else 1)
        steps = [NextStep(command=command, purpose=purpose) for command, purpose in pairs[: limits.items]]
    return Brief(
        schema_version=SCHEMA_VERSION,
        verdict=run.verdict,
        counts=count_verdicts(run),
        waiting=len(run.waiting),
        seconds=round(run.seconds, 1),
        cases=tuple(told),
        omitted=len(open_ones) - len(told) if only is None else 0,
        next=tuple(steps),
    )


def _tell_case(case: CaseResult, numbered: list[Numbered], limits: _Limits) -> BriefCase:
    own = [item for item in numbered if item.case is case]
    told = tuple(_tell_finding(item, limits) for item in own[: limits.findings])
    return BriefCase(
        name=case.name,
        file=case.file,
        verdict=case.verdict,
        reason=_cut(find_reason(case), limits),
        layout=_cut(case.layout, limits),
        findings=told,
        omitted=len(case.findings) - len(told),
    )


def _tell_finding(item: Numbered, limits: _Limits) -> BriefFinding:
    finding = item.finding
    culprit = finding.culprit
    return BriefFinding(
        number=item.number,
        check=finding.check,
        tensor=finding.tensor,
        step=finding.step,
        ranks=finding.ranks[:16],
        error=finding.error,
        bound=finding.bound,
        code=finding.code,
        mechanism=culprit.mechanism if culprit is not None else "",
        proved=culprit is not None and culprit.names_cause,
        cause=_cut(describe_cause(finding), limits),
        where=_cut(describe_where(finding), limits),
        lines=tuple(_cut(line, limits) for line in list_lines(culprit, finding.origins)[: limits.lines]),
        evidence=tuple(_cut(line, limits) for line in describe_evidence(finding)[: limits.items]),
    )


def list_lines(culprit: Culprit | None, origins: Sequence[Origin] = ()) -> list[str]:
    """Return `file:line: code (relation)` of the first wrong operation and of the lines to look at.

    The first line has no relation to be named: it is the operation, or the maker of its wrong input if only that is
    known. Then come its counterpart, the moves of a wrong operand, its origins, each with the line that calls its
    function, and the lines between or around. Without a culprit, there are `origins` alone.
    """
    return _name_lines(_list_origins(origins) if culprit is None else _list_lines(culprit))


def _list_lines(culprit: Culprit) -> list[tuple[CodeLine | None, str]]:
    first: list[tuple[Operation | None, str]] = [(culprit.made, ""), (culprit.here, "takes it")]
    if culprit.made is None or (culprit.names_cause and culprit.mechanism != "group"):
        first = [(culprit.here, ""), (culprit.made, "makes its operand")]
    operations = [
        *first,
        (culprit.there, "the counterpart on one device"),
        *((each, "moves its operand") for each in culprit.moves),
    ]
    own = culprit.lone_line
    lines: list[tuple[CodeLine | None, str]] = [] if own is None else [(own.line, "")]
    lines += [(each.line, relation) for each, relation in operations if each is not None]
    lines += _list_origins(culprit.origins)
    lines += [(each.line, "has the same mistake") for each in culprit.others]
    return lines + [(each.line, "lies between right inputs and it") for each in culprit.between]


def _list_origins(origins: Iterable[Origin]) -> list[tuple[CodeLine | None, str]]:
    """Return the lines from which a wrong result may come, each followed by the line that calls its function."""
    found: list[tuple[CodeLine | None, str]] = []
    for origin in origins:
        found += [(origin.line, describe_relation(origin)), (origin.caller, "calls that function")]
        found += [(line, "calls that function") for line in origin.outer]
    return found


def _name_lines(lines: Iterable[tuple[CodeLine | None, str]]) -> list[str]:
    shown: dict[str, str] = {}
    for line, relation in lines:
        if line is not None:
            text = f"{line.file}:{line.line}: {line.expression}"
            shown.setdefault(text, f"{text} ({relation})" if relation else text.rstrip(": "))
    return list(shown.values())


def _cut(text: str, limits: _Limits) -> str:
    """Return a text with its middle left out if it is too long: its ends name the operation and the proof."""
    if len(text) <= limits.characters:
        return text
    half = (limits.characters - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
