"""Expressions that the user has typed, in the program's own names. Nothing else here evaluates anything."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Any


def compile_expression(text: str, source: str) -> CodeType:
    """Return the code of one expression. Raises SyntaxError."""
    return compile(text, source, "eval")


def evaluate(code: CodeType, global_names: Mapping[str, Any], local_names: Mapping[str, Any]) -> Any:
    """Return the value; whatever the expression raises is raised.

    Both kinds of names go into one new mapping: a lambda or comprehension in the expression must see the local
    ones too, and an assignment expression must not reach the frame.
    """
    return eval(code, {**global_names, **local_names})
