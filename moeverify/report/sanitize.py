"""Text from ranks made safe for a terminal and for XML: it can hold anything."""

from __future__ import annotations

import re

# What XML 1.0 forbids, and what would move the cursor or change the colours of a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """Return the text without terminal escape sequences and control characters; newlines and tabs stay."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _FORBIDDEN.sub("", _ESCAPES.sub("", text))


def elide(text: str, width: int) -> str:
    """Return the text in at most `width` characters, its middle replaced by dots: both ends name a tensor."""
    if len(text) <= width:
        return text
    if width <= 5:
        return text[:width]
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"
