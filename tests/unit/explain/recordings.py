"""Small functions of tensors, recorded as one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.explain.joint import At
from moeverify.explain.program import Op, Program
from moeverify.explain.record import Recorder
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind

MARK = (0, Kind.LOSS, "total")


@contextmanager
def a_group() -> Iterator[None]:
    """Yield a default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def make(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers that distinguish a tensor from any other."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def record_call(
    function: Callable[..., Tensor], region: Region | None = None, /, **inputs: Tensor
) -> Program:
    """Record a function call; its result is shown as `MARK`, as a part of a tensor if there is a `region`."""
    recorder = Recorder()
    recorder.name_tensors(inputs.items())
    with recorder.recording():
        recorder.begin_step(0)
        result = function(**inputs)
        recorder.observe(*MARK, result, region or Region.whole(tuple(result.shape)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def list_ops(program: Program, name: str) -> list[Op]:
    """Return the operators of a short name, in order."""
    return [op for op in program.ops if op.short == name]


def result_of(program: Program, name: str) -> int:
    """Return the value that the only operator of a short name has made."""
    (op,) = list_ops(program, name)
    return op.results[0]


def data_of(program: Program, number: int) -> Tensor:
    """Return the recorded data of a value."""
    data = program.values[number].data
    assert data is not None
    return data


def find_input(program: Program, label: str, rank: int = 0) -> At:
    """Return the value that a function received as input."""
    return rank, next(value.number for value in program.values if value.label == label)


def find_result(program: Program, rank: int = 0) -> At:
    """Return the value that a function has returned."""
    number = program.marks[MARK][-1].value
    assert number is not None
    return rank, number
