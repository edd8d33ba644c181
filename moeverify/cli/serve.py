"""`moeverify serve`: keep a process with the imports of ranks, so that later commands start sooner."""

from __future__ import annotations

from typing import Annotated

import typer

from moeverify.cli.arguments import Device, DeviceOption
from moeverify.cli.context import open_context


def serve(
    idle: Annotated[
        float,
        typer.Option("--idle", metavar="S", min=1, max=86400, help="End after this time without a launch."),
    ] = 900.0,
    device: DeviceOption = Device.auto,
    stop: Annotated[bool, typer.Option("--stop", help="End all such processes of this user.")] = False,
) -> None:
    """Keep a process with the imports of ranks, so that later commands start sooner.

    Later commands find it by themselves, as long as the code of moeverify, torch, the interpreter and the
    variables that libraries read on import stay the same. It runs in the background, holds no GPU memory, and
    ends by itself.
    """
    with open_context() as context:
        from moeverify.verification.controller.machine import choose_device
        from moeverify.verification.launch.warm import is_serving, start_server, stop_servers

        if stop:
            count = stop_servers()
            context.out.print(f"{count} asked to end" if count else "none was running")
            return
        chosen = choose_device(device.value)
        if is_serving(chosen):
            context.out.print("already running; `moeverify serve --stop` ends it")
            return
        process = start_server(chosen, idle)
        context.out.print(
            f"process {process} starts the ranks of later commands on {chosen}. It ends after {idle:g} s without a "
            "launch, or by `moeverify serve --stop`.",
            soft_wrap=True,
        )
