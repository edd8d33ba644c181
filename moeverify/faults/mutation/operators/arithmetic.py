"""Operators on arithmetic: denominators, factors, terms, and local counts instead of global ones."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from moeverify.faults.mutation.operators.base import Rewrite, expression, name_of_call


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


OPERATORS: dict[str, Rewrite] = {
    "other-denominator": _divide,  # a denominator is missing, squared or 1
    "lost-factor": _multiply,  # a factor is missing
    "lost-term": _lose,  # a term or an element is missing
    "local-count": _stay_local,  # a rank's own count in place of that of all
}
