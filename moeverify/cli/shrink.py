"""`moeverify shrink`: the smallest case that still shows a mismatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moeverify.cli.arguments import CaseSelection, Quiet, RunSettings, Save
from moeverify.cli.context import CommandContext, open_context, postponed_signals
from moeverify.cli.options import with_groups

if TYPE_CHECKING:
    from moeverify.cases.schema import Case
    from moeverify.verification.controller.shrink import Shrinking
    from moeverify.verification.controller.smaller_cases import SmallerCases


@with_groups
def shrink(
    *,
    selection: CaseSelection,
    save: Save = None,
    settings: RunSettings,
    quiet: Quiet = False,
) -> None:
    """Make a case that has a mismatch smaller: fewer ranks, layers, steps and rows.

    Every smaller case is verified, and kept if the same check fails for the same kind of cause, and the first
    wrong line is the same, if it is proved. Ctrl-C ends the search and keeps the smallest case so far: in
    NAME-small.yaml, or the file of --save.
    """
    with open_context() as context:
        from moeverify.report.files import check_writable
        from moeverify.report.progress import open_progress
        from moeverify.verification.controller.judgement import JudgementCache
        from moeverify.verification.controller.machine import choose_device
        from moeverify.verification.controller.shrink import Shrinking
        from moeverify.verification.controller.smaller_cases import SmallerCases, examine_place
        from moeverify.verification.launch.warm import warm_server

        case = _choose(selection.load())
        file = save or Path(case.file).with_name(f"{Path(case.file).stem}-small.yaml")
        check_writable([file])
        examine_place(case, file)
        options = replace(
            settings.make_options([case], None),
            golden_folder=None,
            require_goldens=False,
        )
        with open_progress(context.out, quiet=quiet) as progress, warm_server(choose_device(options.device)):
            cases = SmallerCases(
                case,
                selection.list_paths(),
                tuple(selection.overrides or ()),
                selection.pattern,
                options,
                progress.on_event,
                JudgementCache.of(options.cache_folder),
            )
            cases.begin()
            reduction = Shrinking(cases.list_fields, cases.shows, cases.confirms)
            try:
                reduction.search()
            except BaseException:
                with postponed_signals():
                    _write(cases, reduction, file, context, is_whole=False)
                raise
        _write(cases, reduction, file, context, is_whole=True)


def _choose(cases: list[Case]) -> Case:
    """Return the only case. Raises: CaseError if there are several."""
    from moeverify.errors import CaseError, Problem

    if len(cases) > 1:
        names = ", ".join(case.name for case in cases[:8])
        raise CaseError(
            [Problem(f"these are several cases: {names}", remedy="name one, or select one by -k")]
        )
    return cases[0]


def _write(
    cases: SmallerCases,
    reduction: Shrinking,
    file: Path,
    context: CommandContext,
    *,
    is_whole: bool,
) -> None:
    """Write the smallest case so far, and print how it differs from the case itself."""
    from moeverify.report.console import print_fact
    from moeverify.report.files import write_atomically
    from moeverify.results.answer import ShrinkResult
    from moeverify.verification.controller.reductions import name_values
    from moeverify.verification.controller.smaller_cases import write_case

    values, found = cases.shown[name_values(reduction.values)] if is_whole else cases.find_smallest()
    smallest = cases.load(values)
    assert smallest is not None
    before = {each.path: each.value for each in cases.list_fields({}) or ()}
    changes = [f"{path}: {before.get(path)} to {value}" for path, value in values.items()]
    end = "" if is_whole else ", ended early"
    told = [
        f"The smallest case found from {cases.case.name} ({cases.case.file})",
        f"{reduction.num_tried} smaller cases tried{end}",
        f"It shows: {found.check} of {found.tensor}: {found.code or 'no cause'}",
        *([f"First wrong line: {found.line}"] if found.is_proved else []),
        *changes,
    ]
    write_atomically(file, write_case(smallest, file.stem, told))
    sizes = cases.case.layout.world_size, smallest.layout.world_size
    print_fact(
        context.out,
        "smaller",
        "\n".join(changes) or f"nothing{': every smaller case lacks the finding' if is_whole else ' so far'}",
        indent=0,
    )
    print_fact(context.out, "ranks", "{} to {}".format(*sizes), indent=0)
    print_fact(context.out, "tried", f"{reduction.num_tried} cases{end}", indent=0)
    print_fact(context.out, "written", str(file), indent=0)
    fault = cases.options.fault
    context.reply.advise(["run", file, *(["--fault", fault] if fault else [])], "verify the smaller case")
    print_fact(context.out, "next", context.reply.next[-1][0], indent=0)
    context.reply.facts = ShrinkResult(
        case=cases.case.name,
        file=cases.case.file,
        written=str(file),
        ranks=sizes,
        changes={path: (before.get(path), value) for path, value in values.items()},
        finding=found,
        num_tried=reduction.num_tried,
        is_whole=is_whole,
    )
