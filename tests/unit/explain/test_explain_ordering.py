"""Chains of operators that are longer than Python's recursion limit."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import pytest
import torch
from recordings import find_result, make, record_call
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.counterparts import Counterparts, OneDevice
from moeverify.explain.joint import Joint
from moeverify.explain.ordering import list_sources_first
from moeverify.explain.program import Program

LENGTH = 150
X, OTHERS = make(3, 4), make(LENGTH, 3, 4, seed=1)


@pytest.fixture(autouse=True)
def lower_limit() -> Iterator[None]:
    """Lower the recursion limit, so that chains of some hundred operators exceed it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 120)
    yield
    sys.setrecursionlimit(limit)


def flip(x: Tensor, scale: float = 1.0) -> Tensor:
    for _ in range(LENGTH):
        x = x.flip(0)
    return x * scale


def add(x: Tensor, scale: float = 1.0) -> Tensor:
    x = x * scale
    for each in OTHERS:
        x = x + each
    return x


def align(rank: Program, one: Program) -> Alignment:
    return Alignment(Joint([rank]), one)


def test_values_behind_many_moves_are_known() -> None:
    program = record_call(flip, x=X)
    alignment = align(program, record_call(flip, x=X))
    last = alignment.joint.own_reads(alignment.joint.maker(find_result(program)))[0]
    known = alignment.find(last)
    assert known is not None
    assert alignment.is_right(last)
    assert not alignment.is_blank(last)


def test_memory_behind_many_moves_is_blank() -> None:
    program = record_call(lambda x: flip(torch.empty_like(x)) + x, x=X)
    alignment = align(program, program)
    (total,) = [op for op in program.ops if op.short == "add"]
    times = alignment.joint.own_reads((0, total.number))[0]
    assert alignment.is_blank(alignment.joint.own_reads(alignment.joint.maker(times))[0])


def test_counterparts_behind_many_wrong_operators_are_found() -> None:
    one = record_call(add, x=X)
    alignment = align(record_call(lambda x: add(x, 0.5), x=X), one)
    maker = alignment.joint.maker(find_result(alignment.joint.programs[0]))
    found = Counterparts(alignment, OneDevice(one, alignment.elements)).find(maker)
    assert found[0].short == "add"


def test_each_node_comes_once_after_its_sources() -> None:
    sources = {"sum": ["left", "right"], "left": ["leaf"], "right": ["leaf", "known"], "leaf": []}
    assert list_sources_first("sum", sources.__getitem__, {"known"}) == ["leaf", "right", "left", "sum"]
