"""Execution of a mutant in this process, for the duration of a block, by exchanging code objects."""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType

from moeverify.faults.mutation.mutant import ROOT, Mutant
from moeverify.faults.mutation.operators.control import STALE


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Run the rewritten function of a mutant, under whatever name it is called, until the block ends.

    The function object stays the same, so every reference, wrapper or bound method runs the new code. No
    file is changed.

    Raises: LookupError when the loaded module differs from its file.
    """
    module = importlib.import_module(f"moeverify.{mutant.module}")
    function = _find_function(module, mutant)
    before, names = function.__code__, set(vars(module))
    function.__code__ = _find_code(compile(_rewrite(mutant), str(ROOT / mutant.file), "exec"), before)
    try:
        yield
    finally:
        function.__code__ = before
        for name in [each for each in vars(module) if each.startswith(STALE) and each not in names]:
            delattr(module, name)


def _rewrite(mutant: Mutant) -> ast.Module:
    """Return the tree of the mutant's file with its node replaced, at the same lines."""
    # A single deep copy of all three keeps the node identical to the one in the tree.
    tree, node, replacement = copy.deepcopy((mutant.tree, mutant.node, mutant.replacement))

    class Replace(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return replacement if visited is node else super().visit(visited)

    for each in ast.walk(replacement):
        if isinstance(each, ast.expr | ast.stmt | ast.keyword):
            each.lineno = each.end_lineno = mutant.line
            each.col_offset = each.end_col_offset = 0
    rewritten = Replace().visit(tree)
    assert isinstance(rewritten, ast.Module)
    return ast.fix_missing_locations(rewritten)


def _find_function(module: ModuleType, mutant: Mutant) -> FunctionType:
    """Return the outermost function around the node. Inner functions are created anew on each call."""
    path = mutant.function.split(".")
    scopes: list[object] = [module]
    for part in path:
        inner = vars(scopes[-1]).get(part) if isinstance(scopes[-1], ModuleType | type) else None
        if inner is None:
            break
        if isinstance(inner, type):
            scopes.append(inner)
            continue
        function = _unwrap(inner)
        if function is not None and function.__code__.co_filename == module.__file__:
            return function
        break
    raise LookupError(f"`{module.__name__}` has no function `{mutant.function}` of its own")


def _unwrap(value: object) -> FunctionType | None:
    """Return the function beneath decorators, properties and static methods; None if there is none."""
    for name in ("__func__", "fget", "func"):
        value = getattr(value, name, value)
    while not isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
        value = getattr(value, "__wrapped__", None)
        if value is None:
            return None
    return value


def _find_code(module: CodeType, before: CodeType) -> CodeType:
    """Return the code object in the new module's code that corresponds to `before`."""
    waiting = [module]
    while waiting:
        code = waiting.pop()
        if code.co_qualname == before.co_qualname and code.co_firstlineno == before.co_firstlineno:
            return code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    raise LookupError(f"no `{before.co_qualname}` at line {before.co_firstlineno}: its file has changed")
