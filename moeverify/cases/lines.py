"""Line numbers of fields that a text mentions in a case file."""

from __future__ import annotations

import re

from moeverify.cases.entry import Entry

_FIELD = re.compile(r"(?<![\w./-])(?:recipe|layout|checks)(?:\.\w+)*(?![\w/-])")


def find_line(tree: Entry, text: str = "") -> int:
    """Return the line of the first field that `text` names and the file contains, else that of `layout:`."""
    named = [found[0].split(".") for found in _FIELD.finditer(text)]
    for field in [*named, ["layout"], ["recipe"]]:
        if field[0] in tree.fields:
            return tree.locate(field).line or 1
    return 1
