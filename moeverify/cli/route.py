"""`moeverify route`: follows one batch of a case through router, dispatch, experts and combine."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.arguments import (
    Backend,
    BackendOption,
    CaseSelection,
    Device,
    DeviceOption,
    Fault,
    Timeout,
)
from moeverify.cli.context import EXIT_CODES, open_context
from moeverify.cli.options import with_groups


@with_groups
def route(
    *,
    selection: CaseSelection,
    layer: Annotated[
        int | None,
        typer.Option("--layer", min=0, help="The layer to look at. Default: the first with experts."),
    ] = None,
    step: Annotated[
        int, typer.Option("--step", min=0, help="The step of the batch; earlier steps are trained.")
    ] = 0,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=1_000_000, help="Tokens of each rank that are shown.")
    ] = 4,
    fault: Fault = None,
    device: DeviceOption = Device.auto,
    backend: BackendOption = Backend.auto,
    timeout: Timeout = None,
) -> None:
    """Follow one batch of each case: which token goes to which expert on which rank, counts, drops, load.

    The rows that the experts got show where a token was computed, not the layout. Needs no golden.
    """
    with open_context() as context:
        from pydantic import TypeAdapter

        from moeverify.report.progress import show_work
        from moeverify.report.route import render_route
        from moeverify.results.route import RouteReport
        from moeverify.verification.controller.route import follow_cases

        with show_work(context.err, "training each case up to its step"):
            found = follow_cases(
                selection.load(),
                layer=layer,
                step=step,
                num_shown=tokens,
                fault=fault,
                device=device.value,
                backend=backend.value,
                timeout=timeout,
            )
        if found is None:  # only the first of several ranks reports
            return
        for position, report in enumerate(found):
            if position:
                context.out.print()
            render_route(report, context.out)
        context.reply.document = TypeAdapter(list[RouteReport]).dump_json(found, indent=1).decode()
        verdicts = {
            "error" if each.result is None else "pass" if each.result.is_right else "mismatch"
            for each in found
        }
        raise typer.Exit(max(EXIT_CODES[verdict] for verdict in verdicts))
