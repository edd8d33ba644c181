"""Operators on collectives: their presence, number, group and arguments."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping

from moeverify.faults.mutation.operators.base import (
    Rewrite,
    expression,
    name_of_call,
    with_argument,
    with_keyword,
    with_name,
)

# Calls that return their argument summed over ranks. Without them a rank continues with its local value.
_SUMS = {"sum_over", "copy_to", "reduce_from", "_sum", "sum_over_shards", "sum_over_stages"}
_SUMS |= {"over_batch", "over_sequence", "over_tokens", "average"}
_IN_PLACE = {"all_reduce"}
_ON_METHODS = {"redistribute", "full_tensor"}
_WITH_GROUP = _SUMS | {"gather_from", "split_to", "reduce_scatter_from", "all_gather_sum", "exchange_rows"}
_WITH_GROUP |= {"Exchange", "exchange_counts", "_all_gather", "_reduce_scatter", "_slice", "_all_to_all"}

_SWAPPED_CALLS = {
    "copy_to": "reduce_from",
    "reduce_from": "copy_to",
    "gather_from": "all_gather_sum",
    "all_gather_sum": "gather_from",
    "split_to": "reduce_scatter_from",
    "reduce_scatter_from": "split_to",
    "over_batch": "over_sequence",
    "over_sequence": "over_batch",
    "over_tokens": "over_batch",
}
# Functions passed as arguments: the forward or backward of a map over ranks.
_SWAPPED_MAPS = {"_keep": "_sum", "_sum": "_keep", "_slice": "_reduce_scatter", "_reduce_scatter": "_slice"}
_OTHER_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("loss",),
    "loss": ("fsdp", "tp"),
    "fsdp": ("dp_replicate", "loss"),
    "dp_replicate": ("fsdp",),
    "cp": ("loss", "tp"),
    "ep": ("etp", "efsdp"),
    "etp": ("ep",),
    "efsdp": ("ep",),
    "edp": ("ep",),
    "pp": ("loss",),
}
_OTHER_VIEWS = {"dense": "sparse", "sparse": "dense", "data": "dense"}
_PAIRS = ({"receive", "send"}, {"there", "back"}, {"by_rank", "by_expert"}, {"one", "other"})


def _drop(node: ast.AST) -> Iterator[ast.AST]:
    name = name_of_call(node)
    if isinstance(node, ast.Call) and name in _SUMS and node.args:
        yield copy.deepcopy(node.args[0])
    if isinstance(node, ast.Call) and name in _ON_METHODS and isinstance(node.func, ast.Attribute):
        yield copy.deepcopy(node.func.value)
    if isinstance(node, ast.Expr) and name_of_call(node.value) in _IN_PLACE:
        yield ast.Pass()


def _double(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and name_of_call(node) in _SUMS and node.args:
        yield with_argument(node, 0, copy.deepcopy(node))
    if isinstance(node, ast.Expr) and name_of_call(node.value) in _IN_PLACE:
        yield ast.If(ast.Constant(True), [copy.deepcopy(node), copy.deepcopy(node)], [])


def _swap(node: ast.AST) -> Iterator[ast.AST]:
    name = name_of_call(node)
    if isinstance(node, ast.Call) and name in _SWAPPED_CALLS:
        yield with_name(node, _SWAPPED_CALLS[name])
    if isinstance(node, ast.Call) and name == "apply":
        for index, argument in enumerate(node.args):
            if isinstance(argument, ast.Name) and argument.id in _SWAPPED_MAPS:
                yield with_argument(node, index, ast.Name(_SWAPPED_MAPS[argument.id], ast.Load()))


def _reorder(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        for index, (first, second) in enumerate(zip(node.args, node.args[1:], strict=False)):
            names = {each.id for each in (first, second) if isinstance(each, ast.Name)}
            if names in _PAIRS:
                made = with_argument(node, index, copy.deepcopy(second))
                yield with_argument(made, index + 1, copy.deepcopy(first))
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
        first, second = node.value.elts
        if {getattr(each, "id", "") for each in (first, second)} in _PAIRS:
            yield ast.Return(ast.Tuple([copy.deepcopy(second), copy.deepcopy(first)], ast.Load()))


def _regroup(node: ast.AST) -> Iterator[ast.AST]:
    world = expression("__import__('torch').distributed.group.WORLD")
    name = name_of_call(node)
    if isinstance(node, ast.Call) and (name in _WITH_GROUP or name in _IN_PLACE):
        for index, argument in enumerate(node.args):
            if index and _is_group(argument):
                yield with_argument(node, index, world)
        for keyword in node.keywords:
            if keyword.arg == "group":
                yield with_keyword(node, "group", world)
    if isinstance(node, ast.Call) and name in ("group", "size", "mesh_of", "get_group", "over", "shard_mesh"):
        for index, argument in enumerate(node.args):
            if isinstance(argument, ast.Constant):
                for other in _OTHER_AXES.get(str(argument.value), ()):
                    yield with_argument(node, index, ast.Constant(other))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        for other in _OTHER_AXES.get(str(node.slice.value), ()):
            yield ast.Subscript(copy.deepcopy(node.value), ast.Constant(other), ast.Load())
    if isinstance(node, ast.Attribute) and node.attr in _OTHER_VIEWS and _is_meshes(node.value):
        yield ast.Attribute(copy.deepcopy(node.value), _OTHER_VIEWS[node.attr], ast.Load())


def _is_group(node: ast.expr) -> bool:
    named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return "group" in named


def _is_meshes(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "meshes"


def _reduce(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and name_of_call(node) in _IN_PLACE:
        yield with_keyword(node, "op", expression("__import__('torch').distributed.ReduceOp.MAX"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        swapped = {"sum": "mean", "mean": "sum"}.get(node.func.attr)
        if swapped is not None:
            yield with_name(node, swapped)


OPERATORS: dict[str, Rewrite] = {
    "drop-collective": _drop,  # a collective is not called
    "double-collective": _double,  # a collective is called twice
    "swap-collective": _swap,  # another collective, or another backward
    "reorder": _reorder,  # arguments for sending and for receiving are exchanged
    "other-group": _regroup,  # over other ranks
    "other-reduction": _reduce,  # a sum, a mean or a maximum in place of another
}
