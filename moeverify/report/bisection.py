"""The result of `moeverify bisect` as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from moeverify.report.console import print_fact
from moeverify.report.numbers import format_count, format_seconds
from moeverify.results.bisection import Bisection, Commit


def render_bisection(result: Bisection, console: Console) -> None:
    """Print the first bad commit with its verdict, or the candidates for it."""
    for label, text in _list_facts(result):
        print_fact(console, label, text, indent=0)


def _list_facts(result: Bisection) -> Iterator[tuple[str, str]]:
    if result.first_bad is None:
        yield "undecided", "only commits without a verdict are left; one of these is the first bad commit:"
        yield from (("", _describe(commit)) for commit in result.candidates)
    else:
        yield "first bad", _describe(result.first_bad)
        yield "author", f"{result.first_bad.author}, {result.first_bad.date}"
    found = result.judgement
    if found is not None:
        yield "finding", found.headline
        if found.line:
            yield "line", found.line
    if result.files:
        yield "changes", "\n".join(each.replace("\t", " ") for each in result.files)
    skipped = [each for each in result.judged if each.judgement.verdict not in ("pass", "mismatch", "error")]
    for each in skipped:
        yield "skipped", f"{_describe(each.commit)}: {each.judgement.reason or each.judgement.verdict}"
    for note in result.notes:
        yield "note", note
    known = sum(each.is_known for each in result.judged)
    again = f", {known} of them known from before" if known else ""
    count = format_count(len(result.judged), "commit")
    yield "judged", f"{count}{again}; {format_seconds(result.seconds)}"
    if result.first_bad is not None:
        yield "next", f"git show {result.first_bad.hash[:10]}"


def _describe(commit: Commit) -> str:
    return f"{commit.hash} {commit.subject}"
