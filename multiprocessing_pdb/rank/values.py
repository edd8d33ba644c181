"""Describing a value so that ranks can be compared: a short text, and a key, equal for equal values."""

from __future__ import annotations

import hashlib
import re
import reprlib
from typing import Any

from multiprocessing_pdb.rank import tensors

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_MOST_TEXT = 4000
_MOST_LEAVES = 2000
_MOST_DEPTH = 8

Description = dict[str, Any]


class _Walk:
    """One walk through a nested value, up to a number of leaves; tensors are summarised, not copied."""

    def __init__(self) -> None:
        self.leaves = 0
        self.key = hashlib.sha256()

    def visit(self, value: Any, depth: int) -> str:
        self.leaves += 1
        if tensors.is_array(value):
            summary = tensors.summarise(value)
            self.key.update(summary["key"].encode())
            return str(summary["text"])
        if self.leaves < _MOST_LEAVES and depth < _MOST_DEPTH:
            if type(value) is dict:
                parts = [f"{self._name(k)}: {self.visit(v, depth + 1)}" for k, v in value.items()]
                return "{" + ", ".join(parts) + "}"
            if type(value) in (list, tuple):
                self.key.update(f"{type(value).__name__}{len(value)}".encode())
                parts = [self.visit(item, depth + 1) for item in value]
                return ("[{}]" if type(value) is list else "({})").format(", ".join(parts))
        return self._name(value)

    def _name(self, value: Any) -> str:
        # Addresses differ from process to process and say nothing.
        text = _ADDRESS.sub("0x..", repr(value))
        self.key.update(f"{type(value).__qualname__}:{text}\0".encode("utf-8", "backslashreplace"))
        return text


def describe(value: Any) -> Description:
    """Return {"text", "key"}, and for a tensor what `diff` compares. Raises what the value's repr raises."""
    if tensors.is_array(value):
        return tensors.summarise(value)
    walk = _Walk()
    text = walk.visit(value, 0)
    if len(text) > _MOST_TEXT:
        half = _MOST_TEXT // 2
        text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
    return {"text": text, "key": walk.key.hexdigest(), "type": reprlib.repr(type(value).__qualname__)}
