"""Tables of the fault benchmark and of the clean matrix, for the console and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from moeverify.report.console import new_table, print_lines, print_table
from moeverify.report.markdown import make_markdown_table
from moeverify.report.sanitize import clean
from moeverify.report.words.cause import describe_cause, describe_where
from moeverify.results.benchmark_rows import CleanRow, FaultRow, lower_bound, upper_bound

# Column: detected without a wider precision. Shown only if some fault needed a wider one.
_OWN = "in its precision"
_MARKS = {True: "yes", False: "NO"}


def render_faults(rows: Sequence[FaultRow], console: Console) -> None:
    """Print one row per fault, then the rates."""
    table = new_table(console)
    for name in ("fault", "detected", "located", "cause", "line", "step", "loss curve", "and norm"):
        table.add_column(name, no_wrap=True)
    shows_own = any(row.found_in for row in rows)
    if shows_own:
        table.add_column(_OWN, no_wrap=True)
    table.add_column("reported", overflow="fold", ratio=1)
    for row in rows:
        marks = [_mark(value) for value in list_marks(row)]
        seen = [Text("sees it" if value else "blind") for value in (row.loss_curve, row.loss_and_norm)]
        seen += [_mark(row.detected and not row.found_in)] if shows_own else []
        quoted = quote(row)
        table.add_row(Text(row.number), *marks, Text(name_step(row) or "-"), *seen, Text(clean(quoted)))
    print_table(table, console)
    console.print()
    for line in summarize_faults(rows):
        print_lines(console, Text(line))


def list_marks(row: FaultRow) -> tuple[bool, ...]:
    """Return whether a fault was detected, located and named, and whether a line of it was shown."""
    return row.detected, row.located, row.cause_named, row.line_shown


def _call(row: FaultRow) -> str:
    """Return the outcome of a fault that was not detected."""
    return "missed" if row.verdict == "pass" else row.verdict


def _mark(value: bool) -> Text:
    return Text(_MARKS[value], style="green" if value else "bold red")


def summarize_faults(rows: Sequence[FaultRow]) -> list[str]:
    """Return the rates in words, with exact one-sided 95 % bounds."""
    lines = []
    num_skipped = sum(row.verdict == "skipped" for row in rows)
    rows = [row for row in rows if row.verdict != "skipped"]
    for name, hits in (
        ("detected", sum(row.detected for row in rows)),
        ("located", sum(row.located for row in rows)),
        ("cause named", sum(row.cause_named for row in rows)),
        ("a line of the fault shown", sum(row.line_shown for row in rows)),
        ("seen by a loss curve at 1e-3", sum(row.loss_curve for row in rows)),
        ("seen by losses and gradient norm at 1e-3", sum(row.loss_and_norm for row in rows)),
    ):
        rate, bound = hits / max(len(rows), 1), lower_bound(hits, max(len(rows), 1))
        lines.append(f"{name}: {hits} of {len(rows)} ({rate:.0%}; at least {bound:.0%} at 95 % confidence)")
    if any(row.found_in for row in rows):
        own = [row for row in rows if not row.found_in]
        counts = [sum(getattr(row, name) for row in own) for name in ("detected", "located", "cause_named")]
        lines.append(
            "in the precision of the fault alone: detected {}, located {}, cause named {} of {}".format(
                *counts, len(rows)
            )
        )
    if num_skipped:
        lines.append(f"{num_skipped} faults were skipped and are not counted")
    num_moe = sum(row.is_moe for row in rows)
    seconds = sum(row.seconds for row in rows)
    lines.append(
        f"{num_moe} of {len(rows)} faults are of MoE or expert-parallel code; {seconds:.0f} s on the ranks"
    )
    return lines


def write_faults(rows: Sequence[FaultRow], environment: dict[str, str], command: str) -> str:
    """Return the table as a Markdown page."""
    lines = ["# The fault benchmark", "", _made(environment, command), ""]
    lines += [f"- {line}" for line in summarize_faults(rows)]
    shows_own = any(row.found_in for row in rows)
    headers = (
        *("fault", "bug", "detected", "located", "cause named", "line shown", "step"),
        *("losses at 1e-3", "losses and gradient norm at 1e-3"),
        *([_OWN] if shows_own else []),
        "reported",
    )
    table = [
        (
            row.number,
            f"{row.title} ({row.source})",
            *("yes" if value else "**no**" for value in list_marks(row)),
            name_step(row),
            *("sees it" if value else "blind" for value in (row.loss_curve, row.loss_and_norm)),
            *(["**no**" if row.found_in or not row.detected else "yes"] if shows_own else []),
            quote(row, mark="`"),
        )
        for row in rows
    ]
    return "\n".join([*lines, "", make_markdown_table(headers, table)]) + "\n"


def write_json(rows: Sequence[FaultRow], environment: dict[str, str], command: str) -> str:
    """Return the rows as JSON, with the command and environment that produced them."""
    faults = [row.model_dump(mode="json", exclude={"finding"}) for row in rows]
    return json.dumps({"command": command, "environment": environment, "faults": faults}, indent=1) + "\n"


def name_finding_place(row: FaultRow) -> str:
    """Return the tensor of the first finding and the place of its cause."""
    if row.finding is None:
        return ""
    where = describe_where(row.finding)
    return f"{row.finding.tensor} | {where}" if where else row.finding.tensor


def quote(row: FaultRow, mark: str = "") -> str:
    """Return the diagnosis of a fault, or its outcome if undetected; `mark` encloses the place."""
    if row.detected and row.finding is not None:
        place = f"{mark}{name_finding_place(row)}{mark}" + (f" in {row.found_in}" if row.found_in else "")
        return f"{place}: {describe_cause(row.finding)}"
    return f"{_call(row)}: {row.reason or 'nothing differs'}"


def name_step(row: FaultRow) -> str:
    """Return the step at which a fault was first detected, `init` before the first step."""
    if row.finding is None:
        return ""
    return "init" if row.finding.step < 0 else str(row.finding.step)


def write_clean(rows: Sequence[CleanRow], environment: dict[str, str], command: str) -> str:
    """Return the clean matrix as a Markdown page: counts by group, and every run that did not pass."""
    lines = ["# The clean matrix", "", _made(environment, command), ""]
    lines += [f"- {line}" for line in summarize_clean(rows)]
    headers = (
        "group",
        "runs",
        "false positives",
        "largest share of a bound that was used",
        "tensors compared",
        "of these with a bound above 0.5",
        "s on the ranks",
    )
    table = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        table.append(
            (
                group,
                str(len(members)),
                str(sum(row.verdict == "mismatch" for row in members)),
                f"{max(row.worst for row in members):.2g}",
                str(sum(row.tensors for row in members)),
                str(sum(row.blind for row in members)),
                f"{sum(row.seconds for row in members):.0f}",
            )
        )
    lines += ["", make_markdown_table(headers, table)]
    alarms = [f"- {row.name}: {row.verdict}: {row.detail}" for row in rows if row.verdict != "pass"]
    return "\n".join(lines + (["", *alarms] if alarms else [])) + "\n"


def summarize_clean(rows: Sequence[CleanRow]) -> list[str]:
    """Return the false-positive rate in words, with an exact one-sided 95 % bound."""
    ended = [row for row in rows if row.verdict in ("pass", "mismatch")]
    other = Counter(row.verdict for row in rows if row.verdict not in ("pass", "mismatch"))
    wrong, total = sum(row.verdict == "mismatch" for row in ended), max(len(ended), 1)
    rule = f"; rule of three: {3 / total:.2%}" if wrong == 0 else ""
    bound = f"at most {upper_bound(wrong, total):.2%} at 95 % confidence{rule}"
    seconds = sum(row.seconds for row in rows)
    lines = [f"false positives: {wrong} of {len(ended)} clean runs ({bound}); {seconds:.0f} s on the ranks"]
    lines += [f"{count} runs ended as {verdict}" for verdict, count in other.items()]
    return lines


def _made(environment: dict[str, str], command: str) -> str:
    known = ", ".join(f"{name} {environment[name]}" for name in ("torch", "python", "device", "cores"))
    return f"Made by `{command}` with {known}."
