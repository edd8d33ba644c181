"""Arms of conditions and bodies of loops that one device executes and the ranks do not, or that nobody executes."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from moeverify.explain.program import Site
from moeverify.explain.sites import parse_file
from moeverify.explain.syntax import LEAVES, find_function, find_span, name_function


class _Arm(NamedTuple):
    """The lines of an arm, those of the other arm, and the condition or iterable that decides between them."""

    lines: range
    others: range
    header: ast.expr


class LeftOut(NamedTuple):
    """The condition or iterable before lines that one device alone executes, with its function and these lines."""

    header: Site
    function: tuple[str, int]
    lines: tuple[int, ...]


def list_left_out(one: Collection[tuple[str, int]], many: Collection[tuple[str, int]]) -> Iterator[LeftOut]:
    """Yield the arms that `one` has executed and `many` have not, if both have executed their header.

    The lines are (file, line). An arm does not count if `many` have executed the other arm instead, or if it leaves
    the function or the loop, so that they have executed the code after it instead.
    """
    for file in sorted({file for file, _ in one} & {file for file, _ in many}):
        for arm in _list_arms(file):
            alone = tuple(line for line in arm.lines if (file, line) in one)
            is_left = alone and not any((file, line) in many for line in (*arm.lines, *arm.others))
            if is_left and all((file, arm.header.lineno) in each for each in (one, many)):
                line = arm.header.lineno
                site = Site(file, line, name_function(file, line), 0, find_span(arm.header))
                yield LeftOut(site, find_function(file, line), alone)


def list_idle(executed: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return the (file, line) of executed conditions that have led to no executed arm: they change nothing."""
    idle: set[tuple[str, int]] = set()
    for file in {file for file, _ in executed}:
        for header, arms in _list_conditions(file):
            if not any((file, line) in executed and (file, line) not in idle for line in arms):
                idle |= {(file, line) for line in header if (file, line) in executed}
    return idle


@lru_cache(maxsize=64)
def _list_conditions(path: str) -> list[tuple[range, tuple[int, ...]]]:
    """Return the lines of each condition, and those of its arms, inner conditions first."""
    nodes = [node for node in ast.walk(parse_file(path)) if isinstance(node, ast.If)]
    return [
        (_list_lines([node.test]), (*_list_lines(node.body), *_list_lines(node.orelse)))
        for node in reversed(nodes)
    ]


@lru_cache(maxsize=64)
def _list_arms(path: str) -> list[_Arm]:
    found: list[_Arm] = []
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.If):
            pairs = [(node.test, node.body, node.orelse), (node.test, node.orelse, node.body)]
        elif isinstance(node, ast.For | ast.While):
            pairs = [(node.iter if isinstance(node, ast.For) else node.test, node.body, [])]
        else:
            continue
        found += [
            _Arm(_list_lines(body), _list_lines(others), header)
            for header, body, others in pairs
            if body and not isinstance(body[-1], LEAVES)
        ]
    return found


def _list_lines(body: Sequence[ast.stmt | ast.expr]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1) if body else range(0)
