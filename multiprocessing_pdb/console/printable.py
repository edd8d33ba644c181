"""The filter of all text that the console shows: values and names of ranks must not control the terminal."""

from __future__ import annotations

import re

# A prompt also clears the screen, as pdbpp does. Other sequences could forge the terminal's content.
_COLORS = r"\x1b\[[0-9;]*m"
_OF_PROMPTS = rf"{_COLORS}|\x1b\[2J|\x1b\[1;1H"
_ANY, _ANY_OF_PROMPTS = (re.compile(rf"({allowed})|[^\n\t -~]") for allowed in (_COLORS, _OF_PROMPTS))


def make_printable(text: str, *, is_prompt: bool = False) -> str:
    """Return text without characters that Python's repr would escape, except for colors, newlines and tabs.

    These are all that control a terminal or the direction of text, and those that no encoding has.
    """
    return (_ANY_OF_PROMPTS if is_prompt else _ANY).sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[1] or match[0].isprintable() else repr(match[0])[1:-1]
