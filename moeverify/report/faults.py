"""The tables of the fault benchmark and of the clean matrix, on the console and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeverify.report.console import choose_box, print_lines
from moeverify.report.sanitize import clean
from moeverify.report.table import print_table
from moeverify.results.benchmark import CleanRow, FaultRow, lower_bound, upper_bound

_MARKS = {True: "yes", False: "NO"}


def render_faults(rows: Sequence[FaultRow], console: Console) -> None:
    """Print one line a fault and the rates."""
    table = Table(
        box=choose_box(console), pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )
    for name in ("fault", "detected", "located", "cause", "step", "loss curve"):
        table.add_column(name, no_wrap=True)
    table.add_column("what was said", overflow="fold", ratio=1)
    for row in rows:
        marks = [_mark(row.detected), _mark(row.located), _mark(row.cause_named)]
        step = "-" if row.step is None else "init" if row.step < 0 else str(row.step)
        said = f"{row.place}: {row.cause}" if row.detected else f"{_call(row)}: {row.reason}"
        curve = Text("sees it" if row.loss_curve else "blind")
        table.add_row(Text(row.number), *marks, Text(step), curve, Text(clean(said)))
    print_table(table, console)
    console.print()
    for line in summarize_faults(rows):
        print_lines(console, Text(line))


def _call(row: FaultRow) -> str:
    """Return what became of a fault that was not detected."""
    return "missed" if row.verdict == "pass" else row.verdict


def _mark(value: bool) -> Text:
    return Text(_MARKS[value], style="green" if value else "bold red")


def summarize_faults(rows: Sequence[FaultRow]) -> list[str]:
    """Return the rates in words, with the exact one-sided 95 % bounds that such counts allow."""
    lines = []
    num_skipped = sum(row.verdict == "skipped" for row in rows)
    rows = [row for row in rows if row.verdict != "skipped"]
    for name, hits in (
        ("detected", sum(row.detected for row in rows)),
        ("located", sum(row.located for row in rows)),
        ("cause named", sum(row.cause_named for row in rows)),
        ("seen by a loss curve at 1e-3", sum(row.loss_curve for row in rows)),
    ):
        rate, bound = hits / max(len(rows), 1), lower_bound(hits, max(len(rows), 1))
        lines.append(f"{name}: {hits} of {len(rows)} ({rate:.0%}; at least {bound:.0%} at 95 % confidence)")
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
    lines += ["", "| fault | bug | detected | located | cause named | step | loss curve | what was said |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        step = "" if row.step is None else "init" if row.step < 0 else str(row.step)
        said = f"`{row.place}`: {row.cause}" if row.detected else f"{_call(row)}: {row.reason}"
        marks = " | ".join(
            "yes" if value else "**no**" for value in (row.detected, row.located, row.cause_named)
        )
        curve = "sees it" if row.loss_curve else "blind"
        cells = f"{row.number} | {row.title} ({row.source}) | {marks} | {step} | {curve} | {said}"
        lines.append(f"| {cells.replace(chr(10), ' ')} |")
    return "\n".join(lines) + "\n"


def write_clean(rows: Sequence[CleanRow], environment: dict[str, str], command: str) -> str:
    """Return the clean matrix as a Markdown page: counts by group, and every run that cried wolf."""
    lines = ["# The clean matrix", "", _made(environment, command), ""]
    lines += [f"- {line}" for line in summarize_clean(rows)]
    lines += [
        "",
        "| group | runs | false positives | largest share of a bound that was used | tensors compared "
        "| of these with a bound above 0.5 | s on the ranks |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        cells = [
            group,
            str(len(members)),
            str(sum(row.verdict == "mismatch" for row in members)),
            f"{max(row.worst for row in members):.2g}",
            str(sum(row.tensors for row in members)),
            str(sum(row.blind for row in members)),
            f"{sum(row.seconds for row in members):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    alarms = [f"- {row.name}: {row.verdict}: {row.detail}" for row in rows if row.verdict != "pass"]
    return "\n".join(lines + (["", *alarms] if alarms else [])) + "\n"


def summarize_clean(rows: Sequence[CleanRow]) -> list[str]:
    """Return the false positives in words, with the exact one-sided 95 % bound that such a count allows."""
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
