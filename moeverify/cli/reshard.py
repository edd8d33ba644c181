"""`moeverify reshard`: saves under every layout, loads under every layout, compares, and trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from moeverify.cli.arguments import CaseSelection, OutFolder, Quiet, RunSettings
from moeverify.cli.context import open_context
from moeverify.cli.options import with_groups
from moeverify.cli.outputs import Outputs
from moeverify.cli.run import run_and_report

if TYPE_CHECKING:
    from moeverify.results.run import RunResult
    from moeverify.verification.controller.run import OnEvent


@with_groups
def reshard(
    *,
    selection: CaseSelection,
    outputs: Outputs,
    out: OutFolder = None,
    settings: RunSettings,
    quiet: Quiet = False,
) -> None:
    """Load the checkpoint of each layout into every layout, and train on.

    All ordered pairs of the cases that share a recipe, a single device included. The section `checkpoint` of a
    case says after which step it saves, and whether in the background.
    """
    with open_context() as opened:
        context, outputs = outputs.direct(opened), outputs.keeping(out)
        if context.is_first:
            outputs.check()
        cases = selection.load()
        options = settings.make_options(cases, out)
        from moeverify.verification.controller.reshard import make_pairs, run_pairs

        pairs = make_pairs(cases)

        def go(on_event: OnEvent, _: OnEvent) -> RunResult | None:
            return run_pairs(pairs, options, on_event)

        named = [pair.case for pair in pairs]
        raise typer.Exit(run_and_report(go, named, outputs, context, quiet=quiet))
