"""`moeverify doctor`: what this machine can do, and what that means for verification."""

from __future__ import annotations

import typer

from moeverify.cli.context import BAD_INPUT, open_context


def doctor() -> None:
    """Probe this machine, and say what that means.

    Looks at torch, backends and their known faults, GPUs and optional packages.
    """
    with open_context() as context:
        from moeverify.controller.doctor import examine
        from moeverify.report.probes import render_probes

        probes = examine()
        render_probes(probes, context.out)
        raise typer.Exit(BAD_INPUT if any(probe.status == "fail" for probe in probes) else 0)
