"""Evaluation of expressions typed by the user. The only module that evaluates code."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Any


def compile_expression(text: str, source: str) -> CodeType:
    """Return the code of one expression. Raises SyntaxError."""
    return compile(text, source, "eval")


def evaluate(code: CodeType, global_names: Mapping[str, Any], local_names: Mapping[str, Any]) -> Any:
    """Return the value of an expression. Exceptions of the expression propagate.

    Global and local names are merged into a new mapping. Lambdas and comprehensions in the expression can
    then read the local names, and assignment expressions cannot modify the frame.
    """
    return eval(code, {**global_names, **local_names})
