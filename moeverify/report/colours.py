"""The colour of a rank on the console: the same wherever its values are shown."""

from __future__ import annotations

from rich.text import Text

# What a terminal of 16 colours has and shows well on light and dark; red is left for what is wrong.
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
WRONG = "bold red"
RIGHT = "green"


def find_colour(rank: int) -> str:
    """Return the style of a rank."""
    return _COLOURS[rank % len(_COLOURS)]


def style_rank(rank: int) -> Text:
    """Return the number of a rank in its colour."""
    return Text(str(rank), style=find_colour(rank))
