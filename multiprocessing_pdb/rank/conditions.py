"""Conditions that stop a rank when they hold: `until EXPR` and `watch EXPR changes|nan|inf`."""

from __future__ import annotations

import ast
import builtins
import dis
from collections.abc import Mapping
from types import CodeType
from typing import Any

from multiprocessing_pdb.rank.expressions import compile_expression, evaluate
from multiprocessing_pdb.rank.values import Value

KINDS = ("changes", "nan", "inf")
_MOST_CAVEAT = 300


class Condition:
    """An expression that is evaluated before each line of one function.

    `kind` is one of KINDS, or "true" for `until`, which stops only once. An expression that cannot be
    evaluated yet, such as a name without a value, does not hold. One that no longer can has changed.
    """

    def __init__(self, expression: str, kind: str, code: CodeType) -> None:
        self.expression = expression
        self.kind = kind
        self.code = code
        self._compiled = compile_expression(expression, "<watch>")
        self._last: str | None = None
        self.caveat = ""  # why the last value cannot be judged, or not all of it

    @property
    def is_once(self) -> bool:
        """Whether the condition is removed after it has held once."""
        return self.kind == "true"

    def __str__(self) -> str:
        """Return the command as the user typed it, and the function in which it is checked."""
        words = f"until {self.expression}" if self.is_once else f"watch {self.expression} {self.kind}"
        return f"{words} (checked at each line of {self.code.co_name})"

    def check(self, global_names: Mapping[str, Any], local_names: Mapping[str, Any]) -> str:
        """Return the reason to stop here, or an empty string."""
        try:
            value = evaluate(self._compiled, global_names, local_names)
            self.caveat = ""
            return self._judge(value)
        except Exception as error:
            previous, self._last = self._last, None
            self.caveat = f"it has no value here yet ({type(error).__name__}: {error})"[:_MOST_CAVEAT]
            return f"{self.expression} changed: {type(error).__name__}" if previous is not None else ""

    def _judge(self, value: Any) -> str:
        if self.kind == "true":
            return f"until {self.expression}" if value else ""
        taken = Value(value, lambda: None)
        if self.kind == "changes":
            description = taken.describe()
            key, self.caveat = str(description["key"]), str(description["caveat"])
            previous, self._last = self._last, key
            return f"{self.expression} changed" if previous is not None and previous != key else ""
        found = taken.find_bad(self.kind)
        return f"{self.kind} in {self.expression}{found}" if found is not None else ""


def parse_watch(text: str, code: CodeType, names: Mapping[str, Any]) -> Condition:
    """Return the condition of a `watch` command in a function. Raises as `make_condition`."""
    expression, _, kind = text.strip().rpartition(" ")
    if kind not in KINDS or not expression:
        raise ValueError(f"watch needs an expression and one of {', '.join(KINDS)}: watch loss nan")
    return make_condition(expression, kind, code, names)


def make_condition(expression: str, kind: str, code: CodeType, names: Mapping[str, Any]) -> Condition:
    """Return a condition in a function.

    `names` are the names that have a value. Names that the function assigns may be without one.

    Raises ValueError for a name that is not defined, or SyntaxError for the expression.
    """
    condition = Condition(expression, kind, code)
    stored = {step.argval for step in dis.get_instructions(code) if step.opname.startswith("STORE_")}
    known = {*names, *vars(builtins), *code.co_varnames, *code.co_freevars, *stored}
    missing = sorted(_find_free_names(expression) - known)
    if missing:
        raise ValueError(f"{', '.join(missing)} is not defined here")
    return condition


def _find_free_names(expression: str) -> set[str]:
    """Return the names that an expression reads and does not bind itself."""
    nodes = list(ast.walk(ast.parse(expression.strip(), mode="eval")))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    return {node.id for node in names} - bound - {node.arg for node in nodes if isinstance(node, ast.arg)}
