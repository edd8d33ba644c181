"""Operators on tensors: detach, dim, placement, dtype, positions and order of chunks."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from moeverify.faults.mutation.operators.base import (
    Rewrite,
    expression,
    name_of_call,
    with_argument,
    with_keyword,
)

NARROW = "narrow-dtype"

_GRADIENT_CARRIERS = {"copy_to", "reduce_from", "gather_from", "split_to", "reduce_scatter_from"}
_GRADIENT_CARRIERS |= {
    "all_gather_sum",
    "exchange_rows",
    "cross_entropy",
    "_balance",
    "attend",
    "permute_rows",
}
_GRADIENT_CARRIERS |= {"_sum", "_all_to_all", "unpermute", "gather_copies", "full_tensor", "to_local"}
_WITH_DIM = {"gather_from": 1, "split_to": 1, "reduce_scatter_from": 1, "all_gather_sum": 1}
_NARROWED = {"sum_over": 0, "_sum": 0, "copy_to": 0, "reduce_from": 0, "exchange_rows": 0, "over_batch": 0}
_NARROWED |= {"all_gather_sum": 0, "gather_from": 0, "reduce_scatter_from": 0, "attend": 0, "_balance": 0}


def _detach(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and name_of_call(node) in _GRADIENT_CARRIERS:
        yield expression("whole.detach()", whole=node)
    if isinstance(node, ast.Attribute) and node.attr in ("z_sum", "probability_sum"):
        yield expression("whole.detach()", whole=node)


def _attach(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and name_of_call(node) == "detach" and isinstance(node.func, ast.Attribute):
        yield copy.deepcopy(node.func.value)


def _redim(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call):
        return
    index = _WITH_DIM.get(name_of_call(node))
    if index is not None and index < len(node.args) and isinstance(node.args[index], ast.Constant):
        yield with_argument(node, index, _other_dim(node.args[index]))
    for keyword in node.keywords:
        if keyword.arg == "dim" and isinstance(keyword.value, ast.Constant):
            yield with_keyword(node, "dim", _other_dim(keyword.value))
    along = node.args[0] if name_of_call(node) in ("sum", "mean", "cumsum") and node.args else None
    if isinstance(along, ast.Constant):
        yield with_argument(node, 0, _other_dim(along))
    if name_of_call(node) == "t" and isinstance(node.func, ast.Attribute) and not node.args:
        yield copy.deepcopy(node.func.value)


def _other_dim(node: ast.expr) -> ast.expr:
    assert isinstance(node, ast.Constant)
    return ast.Constant(1 if node.value == 0 else 0)


def _replace_placement(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call):
        return
    if name_of_call(node) == "Shard":
        yield expression("__import__('torch').distributed.tensor.Replicate()")
        if node.args and isinstance(node.args[0], ast.Constant):
            yield with_argument(node, 0, _other_dim(node.args[0]))
    if name_of_call(node) == "Replicate":
        yield expression("__import__('torch').distributed.tensor.Shard(0)")
        yield expression("__import__('torch').distributed.tensor.Shard(1)")
    if name_of_call(node) in ("ColwiseParallel", "RowwiseParallel"):
        for keyword in node.keywords:
            if keyword.arg in ("input_layouts", "output_layouts") and isinstance(keyword.value, ast.Name):
                yield with_keyword(
                    node, keyword.arg, expression("__import__('torch').distributed.tensor.Replicate()")
                )


def _narrow(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and node.attr in ("float64", "float32"):
        narrower = {"float64": "float32", "float32": "bfloat16"}[node.attr]
        yield ast.Attribute(copy.deepcopy(node.value), narrower, ast.Load())
    if not isinstance(node, ast.Call):
        return
    index = _NARROWED.get(name_of_call(node))
    if index is not None and index < len(node.args):
        rounded = expression("x.to(__import__('torch').bfloat16).to(x.dtype)", x=node.args[index])
        yield with_argument(node, index, rounded)
    if name_of_call(node) == "to" and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        yield expression("x.to(__import__('torch').bfloat16).to(kept)", x=node.func.value, kept=node.args[0])


def _shift(node: ast.AST) -> Iterator[ast.AST]:
    name = name_of_call(node)
    if (
        isinstance(node, ast.Call)
        and name == "rank"
        and isinstance(node.func, ast.Attribute)
        and not node.args
    ):
        yield expression("(call + 1) % group.size()", call=node, group=node.func.value)
    if isinstance(node, ast.Call) and name == "coordinate" and len(node.args) == 1:
        assert isinstance(node.func, ast.Attribute)
        parts = {"call": node, "meshes": node.func.value, "axis": node.args[0]}
        yield expression("(call + 1) % meshes.size(axis)", **parts)
    if isinstance(node, ast.Call) and name == "range" and node.args:
        yield with_argument(node, len(node.args) - 1, expression("x - 1", x=node.args[-1]))
    if isinstance(node, ast.Call) and name in ("arange", "repeat_interleave") and node.args:
        yield expression("whole.roll(1)", whole=node)
    if isinstance(node, ast.Call) and name == "split_rows":
        yield with_argument(node, 0, expression("x - 1", x=node.args[0]))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and not _is_shape(node.value):
        for side in ("lower", "upper"):
            bound = getattr(node.slice, side)
            if bound is not None:
                made = copy.deepcopy(node)
                setattr(made.slice, side, expression("x + 1", x=bound))
                yield made
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.right, ast.Constant):
        yield ast.BinOp(copy.deepcopy(node.left), ast.Sub(), ast.Constant(0))
    if isinstance(node, ast.Attribute) and node.attr in ("tokens", "targets", "valid", "positions"):
        yield expression("whole.roll(1, -1)", whole=node)


def _is_shape(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _reverse(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call):
        return
    name = name_of_call(node)
    if name in ("chunk", "tensor_split", "unbind"):
        yield expression("whole[::-1]", whole=node)
    if name in ("cat", "stack") and node.args:
        yield with_argument(node, 0, expression("list(x)[::-1]", x=node.args[0]))
    if name == "argsort":
        yield expression("whole.flip(0)", whole=node)


OPERATORS: dict[str, Rewrite] = {
    "add-detach": _detach,  # a result is detached from its graph
    "skip-detach": _attach,  # a value keeps the graph that it should lose
    "other-dim": _redim,  # along another dim
    "other-placement": _replace_placement,  # another placement
    NARROW: _narrow,  # in a narrower dtype
    "off-by-one": _shift,  # positions, slices or ranks are off by one
    "chunk-order": _reverse,  # chunks in the reverse order
}
