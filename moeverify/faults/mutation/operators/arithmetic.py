"""Operators on arithmetic: denominators, factors, terms, and local counts instead of global ones."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from moeverify.faults.mutation.operators.base import MutationOperator, expression, name_of_call
from moeverify.results.cause import Cause


def _divide(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        yield copy.deepcopy(node.left)
        yield expression("a / b / b", a=node.left, b=node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        yield ast.Pass()
    if isinstance(node, ast.Call) and name_of_call(node) == "set_gradient_divide_factor":
        yield expression("None")
    if isinstance(node, ast.Call) and name_of_call(node) == "size" and isinstance(node.func, ast.Attribute):
        yield ast.Constant(1)


def _multiply(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield copy.deepcopy(node.left)
        yield copy.deepcopy(node.right)
    if isinstance(node, ast.Attribute) and node.attr in ("scale", "gradient_share", "num_loss_ranks"):
        yield ast.Constant(1.0)


def _lose(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield copy.deepcopy(node.left)
        yield copy.deepcopy(node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.BitOr):
        yield ast.Pass()
    if isinstance(node, ast.List) and len(node.elts) > 1:
        for index in range(len(node.elts)):
            made = copy.deepcopy(node)
            del made.elts[index]
            yield made
    if isinstance(node, ast.Dict) and len(node.keys) > 1:
        for index in range(len(node.keys)):
            dropped = copy.deepcopy(node)
            del dropped.keys[index], dropped.values[index]
            yield dropped


def _stay_local(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and node.attr == "num_valid":
        yield expression("batch.valid.sum()")
    if isinstance(node, ast.Attribute) and node.attr == "num_rows":
        yield expression("len(batch.tokens)")
    if isinstance(node, ast.Attribute) and node.attr == "num_experts":
        yield expression("x // 2", x=node)


_FACTORS = frozenset(
    {
        Cause.SCALE,
        Cause.TERM_SCALE,
        Cause.SHARE_WEIGHTS,
        Cause.NORM,
        Cause.METRIC,
        Cause.MISSING_REDUCTION,
        Cause.STATE,
    }
)
_TERMS = _FACTORS | {Cause.DETACHED, Cause.STALE}

OPERATORS = (
    MutationOperator("other-denominator", "a denominator is missing, squared or 1", _divide, _FACTORS),
    MutationOperator("lost-factor", "a factor is missing", _multiply, _FACTORS | {Cause.DETACHED}),
    MutationOperator("lost-term", "a term or an element is missing", _lose, _TERMS),
    MutationOperator("local-count", "a rank's own count in place of that of all", _stay_local, _FACTORS),
)
