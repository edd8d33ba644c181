"""Operators on control flow: conditions, skipped or exchanged statements, values that are never refreshed."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from moeverify.faults.mutation.operators.base import Rewrite, expression, name_of_call

STALE = "_kept_by_a_mutant"
"""Prefix of globals in which a mutant keeps values. They are removed with the mutant."""

_REFRESHED = ("count", "valid", "norm", "size", "position", "order", "scale", "coefficient", "total", "share")
_FLIPPED = {"async_op", "run_check", "scale_grads", "use_local_output", "find_unused", "init_sync", "back"}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Gt: ast.GtE,
    ast.Lt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.LtE: ast.Lt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def _invert(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.IfExp) and not _is_negated_by_its_comparison(node.test):
        made = copy.deepcopy(node)
        made.test = ast.UnaryOp(ast.Not(), made.test)
        yield made
    if isinstance(node, ast.comprehension) and node.ifs:
        for index in range(len(node.ifs)):
            kept = copy.deepcopy(node)
            del kept.ifs[index]
            yield kept
    if isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield other
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        compared = copy.deepcopy(node)
        compared.ops = [_COMPARED[type(node.ops[0])]()]
        yield compared
    if isinstance(node, ast.keyword) and node.arg in _FLIPPED and isinstance(node.value, ast.Constant):
        yield ast.keyword(node.arg, ast.Constant(not node.value.value))


def _is_negated_by_its_comparison(test: ast.expr) -> bool:
    """Return whether another comparison mutant is the negation of this test."""
    exact = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], exact)


def _skip(node: ast.AST) -> Iterator[ast.AST]:
    # Without its `super()` call a method has another closure, and its code cannot be exchanged.
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "super()" not in ast.unparse(node):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        yield ast.Pass()
    if isinstance(node, ast.For):
        yield ast.For(
            copy.deepcopy(node.target),
            expression("list(x)[1:]", x=node.iter),
            copy.deepcopy(node.body),
            copy.deepcopy(node.orelse),
        )
        yield ast.For(
            copy.deepcopy(node.target),
            expression("list(x)[:-1]", x=node.iter),
            copy.deepcopy(node.body),
            copy.deepcopy(node.orelse),
        )


def _keep_old(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return
    target = node.targets[0]
    name = (
        target.id
        if isinstance(target, ast.Name)
        else target.attr
        if isinstance(target, ast.Attribute)
        else ""
    )
    called = name_of_call(node.value)
    if any(word in name or word in called for word in _REFRESHED):
        made = copy.deepcopy(node)
        key = ast.Constant(f"{STALE}_{name}_{node.lineno}")
        made.value = expression("globals().setdefault(key, value)", key=key, value=node.value)
        yield made


OPERATORS: dict[str, Rewrite] = {
    "other-condition": _invert,  # a condition is inverted, dropped or off at its border
    "skip-statement": _skip,  # a call, an assignment or one pass of a loop is skipped
    "stale": _keep_old,  # a value is computed once and never refreshed
}
