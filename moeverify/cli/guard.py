"""`moeverify watch --guard`: checks one run of a script while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moeverify.cli.context import EXIT_CODES, CommandContext

if TYPE_CHECKING:
    from moeverify.results.finding import Finding
    from moeverify.scripts.record.hangs import HangReporter


def run_guarded(
    command: list[str],
    context: CommandContext,
    out: Path | None,
    scratch: Path,
    every: int,
    hangs: HangReporter,
    *,
    stops: bool,
    debug: bool,
) -> int:
    """Run a command under guard, print findings as they occur, and return the exit code.

    It is the command's own exit code, or the code of a mismatch if a finding ended the command.
    """
    from moeverify.errors import CaseError, Problem
    from moeverify.report.files import check_writable
    from moeverify.report.numbers import format_count
    from moeverify.report.words.guard import describe_missing_ranks
    from moeverify.report.words.script import describe_unseen
    from moeverify.scripts.guard.command import GuardedCommand
    from moeverify.scripts.guard.exchange import FINDINGS
    from moeverify.scripts.guard.settings import GuardSettings

    if out is not None and (out / FINDINGS).exists():
        problem = Problem(
            f"{out} has findings of another run", path="--out", remedy="name another folder, or remove it"
        )
        raise CaseError([problem])
    if out is not None:
        check_writable([], out)
    folder = (out or scratch / "guard").resolve()
    settings = GuardSettings(out=folder, every=every, debug=debug)
    guarded = GuardedCommand(settings, hangs, lambda finding: _show(context, finding), stops=stops)
    code = guarded.run(command)
    judge = guarded.judge
    if guarded.refused is not None:
        text = f"not all findings are in {folder / FINDINGS}: {guarded.refused.strerror or guarded.refused}"
        context.err.print(f"moeverify watch: {text}", soft_wrap=True)
    if judge.num_missing:
        context.err.print(f"moeverify watch: {describe_missing_ranks(judge.num_missing)}", soft_wrap=True)
    if judge.num_steps:
        found = format_count(len(guarded.findings), "finding")
        steps, ranks = (
            format_count(judge.num_steps, "sampled step"),
            format_count(judge.num_ranks, "rank"),
        )
        seen = f"{found} in {steps} of {ranks}"
    else:
        seen = f"nothing was checked: {describe_unseen()}"
    context.err.print(f"moeverify watch --guard: {seen}", soft_wrap=True)
    if judge.num_steps and judge.unjudged:
        context.err.print(f"    not judged: {'; '.join(judge.unjudged)}", soft_wrap=True)
    return EXIT_CODES["mismatch"] if stops and guarded.findings else code


def _show(context: CommandContext, finding: Finding) -> None:
    from moeverify.report.numbers import format_ranks

    where = (
        f"step {finding.step}, {format_ranks(finding.ranks or (finding.rank,))}"
        if finding.step >= 0
        else "start"
    )
    head = f"moeverify watch: {finding.check}: {finding.tensor} ({where}): {finding.cause}"
    place = f" [{finding.where}]" if finding.where else ""
    context.err.print(head + place, soft_wrap=True)
    for line in finding.evidence:
        context.err.print(f"    {line}", soft_wrap=True)
