"""`moeverify init`: cases, a test and a workflow for a model that moeverify has never seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.context import BAD_INPUT, EXIT_CODES, CommandContext, open_context

if TYPE_CHECKING:
    from moeverify.results.factory import TriedModel
    from moeverify.results.run import RunResult
    from moeverify.verification.controller.init import Tried


def init(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="PKG.MOD:NAME", help="A function or class that makes the model.", show_default=False
        ),
    ],
    *,
    parallelize: Annotated[
        str | None,
        typer.Option(
            "--parallelize",
            metavar="PKG.MOD:FN",
            help="Your `parallelize(model, mesh)`. Default: the one in the module of the model, if any.",
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="An argument, or a field of the configuration, of your model; repeatable.",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where the cases are written.")
    ] = Path("verify"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try everything, and print the files instead of writing them.")
    ] = False,
) -> None:
    """Write cases, a test and a CI workflow for a model of your own.

    Tries the model on one device, makes it smaller by its own configuration, and runs it under the layouts
    that fit. Run it again after changes: files that you have edited are left alone.
    """
    with open_context() as context:
        from moeverify.report.progress import open_progress, show_work
        from moeverify.verification.controller import init as trials

        root, fields = Path.cwd(), trials.parse_fields(given or [])
        _check_folder(folder, root, dry_run)
        with show_work(context.err, f"trying {factory} on one device"):
            model = trials.try_factory(factory, parallelize or "", fields, root)
        _render_model(model, context)
        with open_progress(context.out, quiet=False) as progress:
            tried, result = trials.try_layouts(
                model, root, str(folder), trials.list_candidates(model), progress.on_event
            )
            if pairs := trials.combine(tried):
                more, second = trials.try_layouts(model, root, str(folder), pairs, progress.on_event)
                tried, result = [*tried, *more], result.answered((*result.cases, *second.cases), second)
        raise typer.Exit(_finish(model, tried, result, root, folder, dry_run, context))


def _check_folder(folder: Path, root: Path, dry_run: bool) -> None:
    """Raises: CaseError if the files cannot be written below the current folder."""
    from moeverify.errors import CaseError, Problem
    from moeverify.report.files import check_places
    from moeverify.verification.controller.init_files import list_folders

    if folder.is_absolute() or ".." in folder.parts:
        message = f"{folder} is not below the current folder"
        raise CaseError([Problem(message, path="--folder", remedy="name a folder such as verify")])
    if not dry_run:
        check_places(*list_folders(root, folder))


def _render_model(model: TriedModel, context: CommandContext) -> None:
    from moeverify.report.console import print_fact

    before, after = model.parameters
    print_fact(
        context.out,
        "model",
        f"{model.title}, a step of {after} parameters in {model.seconds:.2g} s",
        indent=0,
    )
    if model.changes:
        changes = ", ".join(f"{name} {old} to {new}" for name, (old, new) in model.changes.items())
        print_fact(context.out, "smaller", f"{before} to {after} parameters: {changes}", indent=0)
    if model.guessed:
        sizes = ", ".join(f"{name} {size}" for name, size in model.guessed.items())
        print_fact(context.out, "guessed", f"{sizes}: the code leaves them open, --arg NAME=VALUE", indent=0)
    if model.loss:
        print_fact(context.out, "loss", model.loss, indent=0)
    for note in model.notes:
        print_fact(context.out, "note", note, indent=0)
    context.out.print()


def _finish(
    model: TriedModel,
    tried: list[Tried],
    result: RunResult,
    root: Path,
    folder: Path,
    dry_run: bool,
    context: CommandContext,
) -> int:
    """Write the files of the layouts that apply, print everything, and return the exit code."""
    from moeverify.report.console import print_fact
    from moeverify.report.sorting import group_texts
    from moeverify.report.text import render_run
    from moeverify.results.answer import InitResult, TriedLayout, WrittenFile
    from moeverify.verification.controller.init_files import list_files, write_files
    from moeverify.verification.controller.run import find_overall_verdict

    applied = [each for each in tried if not each.obstacle]
    cases = tuple(each.result for each in applied)
    out = context.out
    if cases:
        verdict = find_overall_verdict(cases)
        render_run(result.model_copy(update={"cases": cases, "verdict": verdict}), out)
        out.print()
    layouts = tuple(
        TriedLayout(name=each.candidate.name, verdict=each.result.verdict, obstacle=each.obstacle)
        for each in tried
    )
    context.reply.facts = InitResult(model=model, layouts=layouts)
    obstacles = [(each.candidate.name, each.obstacle) for each in tried if each.obstacle]
    for text, names in group_texts(obstacles):
        print_fact(out, "left out", f"{', '.join(names)}: {text}", indent=0)
    if not cases:
        context.fail("no layout applies to this model, and no file was written")
        return BAD_INPUT
    files = list(list_files(root, str(folder), model, [each.candidate for each in applied]))
    states: list[tuple[Path, str]] = []
    if dry_run:
        states = [(path, "printed") for path, _ in files]
        for path, text in files:
            out.print(f"\n--- {path}\n{text}", end="", soft_wrap=True)
    else:
        for path, state in write_files(root, files):
            label, note = ("kept", ": you have edited it") if state == "edited" else (state, "")
            print_fact(out, label, f"{path}{note}", indent=0)
            states.append((path, state))
        print_fact(out, "next", f"moeverify run {folder}, or pytest tests/test_layouts.py", indent=0)
        context.reply.advise(["run", folder], "verify the layouts")
    written = tuple(WrittenFile(path=str(path), state=state) for path, state in states)
    context.reply.facts = InitResult(model=model, layouts=layouts, files=written)
    return EXIT_CODES[verdict]
