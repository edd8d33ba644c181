"""`moeverify skill`: instructions for coding agents."""

from __future__ import annotations

from importlib.resources import files

from moeverify.cli.context import open_context


def skill() -> None:
    """Print instructions for a coding agent: `moeverify skill > SKILL.md`.

    How to verify a change, read the result, bisect, and debug ranks without a terminal.
    """
    with open_context() as context:
        text = files("moeverify.cli").joinpath("SKILL.md").read_text()
        context.out.print(text, end="", soft_wrap=True)
