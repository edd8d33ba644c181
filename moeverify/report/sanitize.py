"""Sanitizing of text from ranks, which may contain anything, for terminals and XML."""

from __future__ import annotations

import re

# Terminal escape sequences (cursor, colours); characters that XML 1.0 forbids, and those that reverse text.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

MOST_TEXT = 600
"""Characters of one message of an error."""


def clean(text: str) -> str:
    """Return the text without terminal escape sequences and control characters; keep newlines and tabs."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _FORBIDDEN.sub("", _ESCAPES.sub("", text))


def elide(text: str, width: int) -> str:
    """Return the text in at most `width` characters; dots replace the middle of a longer one."""
    if len(text) <= width:
        return text
    if width <= 5:
        return text[:width]
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"
