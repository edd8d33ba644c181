"""Console output of a run: the table, details of each failed case, and a summary line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import STYLES, new_table, print_fact, print_lines, print_table, style_verdict
from moeverify.report.failed_ranks import RankGroup, cut_stack, find_problems, group_ranks
from moeverify.report.finding_rows import describe_finding, name_finding, name_tensor
from moeverify.report.matrix import render_matrices
from moeverify.report.next_steps import Kept, advise, name_rest
from moeverify.report.numbers import format_bound, format_count, format_number, format_ranks, format_seconds
from moeverify.report.sanitize import clean, elide
from moeverify.report.sorting import (
    count_tensors,
    count_verdicts,
    find_worst_check,
    group_texts,
    order_findings,
)
from moeverify.report.words.run import describe_goldens, list_notes
from moeverify.results.finding import Finding, Verdict
from moeverify.results.run import CaseResult, RunResult

# Shorter tensor names would be unreadable; the findings show them in full.
_MIN_TENSOR_WIDTH = 16
# Longer case names may be folded. Shorter ones stay on one line, and other columns are dropped if
# necessary.
_MIN_CASE_WIDTH = 24
_GAP = 2
_HEADERS = ("case", "ranks", "compared", "worst / bound", "s", "verdict")
_LEFT_OUT_FIRST = ("s", "compared", "ranks", "worst / bound")


def make_table(cases: Sequence[CaseResult], console: Console) -> Table:
    """Return the table of a run, one row per case.

    Columns: ranks, tensors compared and number of checks, worst error, its tensor, time, verdict. The
    tensor's name takes the remaining width. In a narrow terminal it is dropped first, then the numbers; the
    case and its verdict are always shown.
    """
    rows = [dict(zip(_HEADERS, _make_row(case), strict=True)) for case in cases]
    widths = {header: max(len(header), *(len(row[header]) for row in rows)) for header in _HEADERS}
    headers = _choose_columns(widths, console.width)
    room = console.width - sum(widths[header] + _GAP for header in headers)
    table = new_table(console)
    has_tensor = room >= _MIN_TENSOR_WIDTH and len(headers) == len(_HEADERS)
    for header in headers:
        if header == "s" and has_tensor:
            table.add_column("worst tensor", no_wrap=True)
        is_text = header in ("case", "verdict")
        table.add_column(
            header,
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=header != "case",
            min_width=min(widths[header], _MIN_CASE_WIDTH, (console.width - 1) // 2)
            if header == "case"
            else None,
        )
    for case, row in zip(cases, rows, strict=True):
        cells = [Text(row[header]) for header in headers]
        cells[-1] = style_verdict(case.verdict)
        if has_tensor:
            cells.insert(headers.index("s"), Text(elide(_name_worst(case), room)))
        table.add_row(*cells)
    return table


def _choose_columns(widths: Mapping[str, int], width: int) -> list[str]:
    """Return the columns that leave enough room for the case name."""
    headers = list(_HEADERS)
    for header in _LEFT_OUT_FIRST:
        others = sum(widths[other] + _GAP for other in headers if other != "case")
        if width - others - _GAP >= min(widths["case"], _MIN_CASE_WIDTH):
            break
        headers.remove(header)
    return headers


def _make_row(case: CaseResult) -> tuple[str, ...]:
    """Return the cells of one case as plain text, in header order."""
    compared = f"{count_tensors(case)} in {len(case.checks)}" if case.checks else "-"
    worst = find_worst_check(case)
    numbers = "-"
    if worst is not None and worst.worst is not None:
        numbers = f"{format_number(worst.worst.error)} / {format_bound(worst.worst.bound)}"
    ran = case.verdict != "skipped"
    seconds = f"{case.seconds:.1f}" if ran else "-"
    return clean(case.name), str(case.ranks), compared, numbers, seconds, style_verdict(case.verdict).plain


def _name_worst(case: CaseResult) -> str:
    """Return check and tensor of the worst error, or the reason of a case that has none."""
    worst = find_worst_check(case)
    if worst is None or worst.worst is None:
        return clean(case.reason).split("\n", 1)[0]
    return name_tensor(worst.name, clean(worst.worst.tensor))


_MAX_FINDINGS = 5
_MAX_STACK_LINES = 12


def render_run(
    run: RunResult,
    console: Console,
    *,
    folder: Path | None = None,
    file: Path | None = None,
    quiet: bool = False,
) -> None:
    """Print a run. `quiet` omits the table, skipped cases, notes and environment.

    `folder` is where the complete run is kept, and `file` its JSON file, if any.
    """
    kept = Kept(folder, file)
    if not quiet and run.cases:
        _render_overview(run, console)
    for case in run.cases:
        if case.has_failed:
            _render_case(case, run, console, kept)
    open_ones = [(case.name, case.reason) for case in run.cases if case.verdict == "undecided"]
    _render_groups("undecided", open_ones, console)
    if not quiet:
        _render_groups("skipped", [(c.name, c.reason) for c in run.cases if c.verdict == "skipped"], console)
        _render_groups("note", [(c.name, note) for c in run.cases for note in list_notes(c)], console)
        _render_environment(run, console)
    print_lines(console, summarize_run(run))


def _render_overview(run: RunResult, console: Console) -> None:
    """Print the tables: matrices for reshard pairs, one row per case for the others."""
    for part in render_matrices(run.cases, console):
        if isinstance(part, Text):
            print_lines(console, part)
        else:
            print_table(part, console)
            console.print()
    others = [case for case in run.cases if not case.saved_by]
    if others:
        print_table(make_table(others, console), console)
        console.print()


def summarize_run(run: RunResult) -> Text:
    """Return the summary line: verdict, cases per verdict, tensors compared, time."""
    # If every case was skipped, the run must not be reported as passed.
    idle = run.verdict == "pass" and run.cases and all(case.verdict == "skipped" for case in run.cases)
    verdict: Verdict = "skipped" if idle else run.verdict
    line = Text.assemble(style_verdict(verdict), f"  {format_count(len(run.cases), 'case')}")
    for position, (kind, number) in enumerate(count_verdicts(run).items()):
        line.append(", " if position else ": ")
        line.append(f"{number} {kind}", style=STYLES[kind])
    tensors = sum(count_tensors(case) for case in run.cases)
    if run.waiting:
        line.append(f"; {len(run.waiting)} have not finished")
    line.append(f"; {format_count(tensors, 'tensor')} compared; ")
    return line.append(format_seconds(run.seconds))


def _render_case(case: CaseResult, run: RunResult, console: Console, kept: Kept) -> None:
    """Print one failed case: its findings or failed ranks, and suggested commands."""
    title = Text.assemble((clean(case.name), "bold"), "  ", style_verdict(case.verdict))
    title.append(f"  {format_count(case.ranks, 'rank')}, {format_seconds(case.seconds)}  {clean(case.file)}")
    print_lines(console, title)
    for label, text in (("reason", case.reason), ("recipe", case.recipe), ("layout", case.layout)):
        if text:
            print_fact(console, label, text, indent=2)
    if case.findings:
        _render_findings(case, console, kept)
    problems = find_problems(case.rank_reports)
    # The problems describe the error in the case; the stacks of the ranks that noticed it add nothing.
    for problem in problems[1:]:
        print_fact(console, "also", problem, indent=2)
    for group in group_ranks(case.rank_reports) if not problems else ():
        _render_group(group, case, console, kept)
    console.print()
    before = [finding for other in run.cases[: run.cases.index(case)] for finding in other.findings]
    number = 1 + sum(not finding.follows for finding in before)
    for command, purpose in advise(case, run.command, kept, number):
        # Never wrapped, so that the command can be copied.
        console.print(
            Text.assemble((f"  next, {purpose}:\n", "dim"), "    ", (command, "cyan")), soft_wrap=True
        )
    console.print()


def _render_findings(case: CaseResult, console: Console, kept: Kept) -> None:
    """Print the first findings in full, and how many more there are and where."""
    findings = order_findings(case.findings)
    per_check = Counter(finding.check for finding in findings)
    counts = ", ".join(f"{number} of {check}" for check, number in per_check.most_common())
    print_fact(console, "differ", f"{counts}; {_count_checks(case)}", indent=2)
    shown_before: list[tuple[str, str]] = []
    origins = [finding for finding in findings if not finding.follows]
    shown = (origins or findings)[:_MAX_FINDINGS]
    for finding in shown:
        facts = describe_finding(finding)
        _render_finding(finding, _fold_facts(facts, shown_before), console)
        shown_before = facts
    num_left_out = len(findings) - len(shown)
    if num_left_out > 0:
        where = name_rest(case, kept)
        num_followers = len(findings) - len(origins) if origins else 0
        which = f", {num_followers} of them follow from the findings above" if num_followers else ""
        console.print()
        print_lines(console, Text(f"  and {format_count(num_left_out, 'more finding')}{which}: {where}"))


def _count_checks(case: CaseResult) -> str:
    """Return how many of the checks failed."""
    failed = sum(check.verdict != "pass" for check in case.checks)
    return f"{failed} of {format_count(len(case.checks), 'check')} failed"


def _fold_facts(facts: list[tuple[str, str]], before: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the facts, with `as above` for a cause, place or evidence equal to the previous finding's."""
    folded: list[tuple[str, str]] = []
    for label, group in groupby(facts, key=itemgetter(0)):
        own = list(group)
        same = label in ("cause", "where", "evidence") and own == [
            fact for fact in before if fact[0] == label
        ]
        folded.extend([(label, "as above")] if same else own)
    return folded


def _render_finding(finding: Finding, facts: list[tuple[str, str]], console: Console) -> None:
    """Print one finding, starting with its name."""
    console.print()
    print_lines(console, Text(f"  {clean(name_finding(finding))}", style="bold"))
    previous = ""
    for label, text in facts:
        style = "yellow" if label == "cause" else ""
        print_fact(console, "" if label == previous else label, text, indent=4, style=style)
        previous = label


def _render_group(group: RankGroup, case: CaseResult, console: Console, kept: Kept) -> None:
    """Print the ranks of one group: state, last collective, end of the stack."""
    console.print()
    same = ": same stack" if len(group.ranks) > 1 and group.stack else ""
    print_lines(console, Text(f"  {format_ranks(group.ranks)} {group.state}{same}", style="bold"))
    for label, texts in (("", group.summaries), ("in", group.collectives)):
        for text, ranks in texts:
            who = "" if ranks == group.ranks else f"{format_ranks(ranks)}: "
            print_fact(console, label or "what", who + text, indent=4)
    if group.stack:
        # Ranks stopped because of other failures are less informative.
        num_lines = _MAX_STACK_LINES if group.state != "stopped" else _MAX_STACK_LINES // 3
        text, left_out = cut_stack(clean(group.stack), num_lines)
        for line in text.splitlines():
            console.print(Text(f"    {line}"), soft_wrap=True)
        if left_out:
            where = name_rest(case, kept, "`rank_reports`")
            print_lines(console, Text(f"    ({left_out} more lines: {where})", style="dim"))


def _render_groups(label: str, pairs: list[tuple[str, str]], console: Console) -> None:
    """Print each distinct reason or note once, with the cases to which it applies."""
    for text, names in group_texts(pairs):
        cases = ", ".join(names)
        print_fact(console, label, f"{cases}: {text}" if text else cases, indent=0)
    if pairs:
        console.print()


def _render_environment(run: RunResult, console: Console) -> None:
    """Print the goldens that had to be recorded, and the environment of the run."""
    if made := describe_goldens(run.goldens):
        print_fact(console, "goldens", made, indent=0)
        console.print()
    if run.environment:
        line = ", ".join(f"{key} {value}" for key, value in run.environment.items())
        line += f", {run.launches} launch{'es' if run.launches > 1 else ''}" if run.launches else ""
        print_lines(console, Text(clean(line), style="dim"))
