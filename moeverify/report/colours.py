"""Console colours of ranks: a rank has the same colour wherever its values are shown."""

from __future__ import annotations

from rich.text import Text

# Available in 16-colour terminals and readable on light and dark backgrounds. Red is reserved for errors.
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
WRONG = "bold red"
RIGHT = "green"


def find_colour(rank: int) -> str:
    """Return the style name of a rank."""
    return _COLOURS[rank % len(_COLOURS)]


def style_rank(rank: int) -> Text:
    """Return the rank's number in its colour."""
    return Text(str(rank), style=find_colour(rank))
