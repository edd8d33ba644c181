"""A run as JUnit XML, for the test view of a CI server."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree as ET

from moeverify.report.failed_ranks import group_ranks
from moeverify.report.files import write_atomically
from moeverify.report.finding_rows import describe_finding, name_finding
from moeverify.report.numbers import format_number, format_ranks
from moeverify.report.sanitize import clean
from moeverify.report.sorting import order_findings
from moeverify.report.words.cause import describe_cause
from moeverify.report.words.run import list_notes
from moeverify.results.run import CaseResult, RunResult

# CI servers keep the text of a failure in memory and may cut it anywhere; the JSON contains everything.
_MAX_FINDINGS = 50


def write(run: RunResult, path: Path) -> None:
    """Write the run's JUnit XML to `path` atomically.

    Raises: OSError when writing fails.
    """
    write_atomically(path, format_junit(run))


def format_junit(run: RunResult) -> str:
    """Return one test suite with one test case per case.

    Schema: `junit-10.xsd` of Jenkins' xunit plugin, the strictest one in use.
    """
    verdicts = [case.verdict for case in run.cases]
    num_undecided = verdicts.count("undecided")
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count("mismatch") + (0 if run.allows_undecided else num_undecided)),
        "errors": str(verdicts.count("error")),
        "time": f"{run.seconds:.3f}",
    }
    root = ET.Element("testsuites", {"name": "moeverify", **counts})
    suite = ET.SubElement(root, "testsuite", {"name": "moeverify", **counts})
    suite.set("skipped", str(verdicts.count("skipped") + (num_undecided if run.allows_undecided else 0)))
    if (timestamp := _format_timestamp(run.started)) is not None:
        suite.set("timestamp", timestamp)
    properties = ET.SubElement(suite, "properties")
    about = {**run.environment, "command": run.command, "verdict": run.verdict}
    for name, value in sorted(about.items()):
        ET.SubElement(properties, "property", {"name": clean(name), "value": clean(value)})
    for case in run.cases:
        _add_case(suite, case, allows_undecided=run.allows_undecided)
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _format_timestamp(started: str) -> str | None:
    """Return the start time as the schema requires, without time zone; None if unknown."""
    try:
        return datetime.fromisoformat(started).replace(tzinfo=None).isoformat(timespec="seconds")
    except ValueError:
        return None


def _add_case(suite: ET.Element, case: CaseResult, *, allows_undecided: bool) -> None:
    """Append one test case with its failure, error or reason for skipping.

    An undecided case is a failure of this type; if it is allowed, it is skipped with its reason.
    """
    file = Path(case.file or "moeverify")  # the comparison of two recorded runs has none
    group = file.with_suffix("").as_posix().strip("./").replace("/", ".") or "moeverify"
    attributes = {"classname": clean(group), "name": clean(case.name), "time": f"{case.seconds:.3f}"}
    element = ET.SubElement(suite, "testcase", attributes)
    if case.verdict == "skipped":
        ET.SubElement(element, "skipped", {"message": clean(case.reason)})
    elif case.verdict == "undecided" and allows_undecided:
        ET.SubElement(element, "skipped", {"message": clean(f"undecided: {case.reason}")})
    elif case.verdict == "undecided":
        _add_failure(element, "failure", case.reason, "", kind="undecided")
    elif case.verdict == "mismatch":
        _add_failure(element, "failure", _summarize_mismatch(case), _describe_findings(case))
    elif case.verdict == "error":
        parts = [_describe_ranks(case), _describe_findings(case)]
        text = "\n\n".join(part for part in parts if part)
        _add_failure(element, "error", case.reason or "a rank failed", text)
    if output := _describe_output(case):
        ET.SubElement(element, "system-out").text = clean(output)


def _add_failure(element: ET.Element, tag: str, message: str, text: str, *, kind: str = "") -> None:
    """Append a failure or an error; its type is shown by CI servers beside the message."""
    kind = kind or ("mismatch" if tag == "failure" else "rank-failure")
    failure = ET.SubElement(element, tag, {"message": clean(message), "type": kind})
    failure.text = clean(text)


def _summarize_mismatch(case: CaseResult) -> str:
    """Return one line: the first finding, and the number of others."""
    findings = order_findings(case.findings)
    if not findings:
        return case.reason or "the results of the layout differ from its golden"
    first = findings[0]
    numbers = f"error {format_number(first.error)}, bound {format_number(first.bound)}"
    cause = f": {why}" if (why := describe_cause(first)) else ""
    others = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{name_finding(first)}: {numbers}{cause}{others}"


def _describe_findings(case: CaseResult) -> str:
    """Return the findings as text, in report order."""
    findings = order_findings(case.findings)
    blocks = [
        "\n".join(
            [name_finding(finding), *(f"    {label}: {text}" for label, text in describe_finding(finding))]
        )
        for finding in findings[:_MAX_FINDINGS]
    ]
    if len(findings) > _MAX_FINDINGS:
        blocks.append(f"and {len(findings) - _MAX_FINDINGS} more, which the JSON report holds")
    return "\n\n".join(blocks)


def _describe_ranks(case: CaseResult) -> str:
    """Return the reports of the ranks of a failed launch; equal stacks appear once."""
    blocks = []
    for group in group_ranks(case.rank_reports):
        lines = [f"{format_ranks(group.ranks)} {group.state}"]
        lines += [f"    {format_ranks(ranks)}: {text}" for text, ranks in group.summaries]
        lines += [f"    {format_ranks(ranks)}: last collective {text}" for text, ranks in group.collectives]
        lines += [f"    {line}" for line in group.stack.splitlines()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _describe_output(case: CaseResult) -> str:
    """Return details that apply to passing cases too: recipe, layout, worst error of each check, notes."""
    lines = [f"file: {case.file}"] if case.file else []
    lines += [f"{key}: {value}" for key, value in (("recipe", case.recipe), ("layout", case.layout)) if value]
    for check in case.checks:
        worst = check.worst
        numbers = (
            f", worst {format_number(worst.error)} of {format_number(worst.bound)}: {worst.tensor}"
            if worst
            else ""
        )
        note = f" ({check.note})" if check.note else ""
        lines.append(f"{check.verdict} {check.name}: {check.tensors} tensors{numbers}{note}")
    lines += [f"note: {note}" for note in list_notes(case)]
    return "\n".join(lines)
