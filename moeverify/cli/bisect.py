"""`moeverify bisect`: the commit of the user's repository since which a case fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moeverify.cli.arguments import Quiet
from moeverify.cli.context import open_context

_UNDECIDED = 4


def bisect(
    commits: Annotated[
        str,
        typer.Argument(
            metavar="GOOD..BAD",
            help="Commits on which the case passes and fails, e.g. v1.0..HEAD.",
            show_default=False,
        ),
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="CASE",
            help="After `--`: the case, and options of `moeverify run`.",
            show_default=False,
        ),
    ],
    *,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, max=64, help="Verify this many commits at a time.")
    ] = 1,
    quiet: Quiet = False,
) -> None:
    """Find the commit since which a case fails: `moeverify bisect v1..HEAD -- verify/tp.yaml`.

    Each commit is checked out into a temporary worktree. Commits without a verdict are skipped. Exits with 0
    if the commit is found, 2 if an end of the range has the wrong verdict, 4 if only skipped commits are left.
    """
    with open_context() as context:
        from moeverify.report.bisection import render_bisection
        from moeverify.report.progress import open_progress
        from moeverify.verification.controller.bisect import CommitSearch
        from moeverify.verification.controller.commit_judge import CommitCase, CommitJudge
        from moeverify.verification.controller.git_history import Repository
        from moeverify.verification.controller.judgement import JudgementCache
        from moeverify.verification.controller.scratch import scratch_folder

        repository = Repository.find(Path.cwd(), os.environ)
        good, bad = (repository.resolve(each) for each in _split(commits))
        case = CommitCase.find(Path(command[0]), command[1:], Path.cwd(), repository)
        if bad == repository.resolve("HEAD") and repository.is_dirty():
            text = "note: uncommitted changes are in no commit and are not verified"
            context.err.print(text, soft_wrap=True)
        with scratch_folder() as scratch:
            state = repository.worktree(scratch / "state", checkout=False)
            judges = CommitJudge.open(case, JudgementCache.of(None), scratch, jobs)
            progress = open_progress(context.out, quiet=quiet, noun="commit")
            with state as folder, judges as judge, progress as shown:
                search = CommitSearch(repository, folder, judge, shown.on_event, jobs)
                result = search.find(good, bad)
                result = result.model_copy(update={"notes": (*result.notes, *judge.list_notes())})
        context.reply.document = result.model_dump_json(indent=2) + "\n"
        render_bisection(result, context.out)
        raise typer.Exit(0 if result.outcome == "found" else _UNDECIDED)


def _split(commits: str) -> tuple[str, str]:
    """Return GOOD and BAD; an empty BAD is HEAD.

    Raises: CaseError if the text is no range.
    """
    from moeverify.errors import CaseError, Problem

    good, dots, bad = commits.partition("..")
    if not dots or not good or bad.startswith("."):
        remedy = "write for example `v1.0..HEAD`"
        raise CaseError([Problem(f"`{commits}` is no range of commits", path="GOOD..BAD", remedy=remedy)])
    return good, bad or "HEAD"
