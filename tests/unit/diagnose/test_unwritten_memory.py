"""Memory that was allocated and never written: what counts as a read of it, and what is said of a module then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from wrong_tensors import draw, examine, make_origin

from moeverify.diagnose.unwritten_memory import UnwrittenRead, UnwrittenWatch
from moeverify.results.cause import Cause
from moeverify.results.operation import Unwritten

INSIDE = frozenset({("forward", "layers.0.moe"), ("forward", "")})
SITE = "/x/collectives.py:7 in gather"


def watch(
    run: Callable[[], object], inside: frozenset[tuple[str, str]] | None = INSIDE
) -> list[UnwrittenRead]:
    with UnwrittenWatch(lambda: inside) as found:
        run()
    return found.reads


def _read_after(write: Callable[[Tensor], object]) -> Callable[[], object]:
    def run() -> object:
        memory = torch.empty(4, 2)
        write(memory)
        return memory + 1.0

    return run


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4, 2),
        lambda: torch.ones(2).new_empty((4, 2)),
        lambda: torch.empty_like(torch.ones(4, 2)),
        lambda: torch.empty(8).view(4, 2),
        lambda: torch.empty(4, 2, dtype=torch.int64),
        lambda: torch.empty(4, 2, dtype=torch.bfloat16),
    ],
)
def test_what_nothing_has_written_is_told_where_it_is_read(make: Callable[[], Tensor]) -> None:
    (read,) = watch(lambda: torch.cat(list(make().chunk(2))))
    assert read.inside == INSIDE
    assert all(__file__ in site for site in (read.allocated_at, read.read_at))


@pytest.mark.parametrize(
    "write",
    [
        lambda memory: memory.zero_(),
        lambda memory: memory[0].copy_(torch.ones(2)),  # a part is enough
        lambda memory: torch.add(torch.ones(4, 2), 1.0, out=memory),
        lambda memory: memory.scatter_(0, torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)),
    ],
)
def test_what_was_written_is_not(write: Callable[[Tensor], object]) -> None:
    assert watch(_read_after(write)) == []


def test_what_a_kernel_has_written_that_torch_does_not_see_is_not() -> None:
    def write(memory: Tensor) -> None:
        ctypes.memset(memory.data_ptr(), 0, 4)  # one element of it

    assert watch(_read_after(write)) == []


def test_what_is_written_over_or_looked_at_for_its_shape_is_not_read() -> None:
    def run() -> None:
        order = torch.tensor([2, 0, 1])
        torch.empty_like(order).scatter(0, order, torch.arange(3))
        torch.zeros_like(torch.empty(3))
        torch.empty(6).view(2, 3).T.detach()

    assert watch(run) == []


def test_the_address_of_what_is_gone_says_nothing_of_what_comes_there() -> None:
    def run() -> None:
        for _ in range(50):
            torch.empty(16)
            torch.ones(16).add(1.0)

    assert watch(run) == []


@pytest.mark.filterwarnings("ignore")  # of flex attention, that it is not compiled
def test_operators_of_functions_and_compiled_code_run_as_without_it() -> None:
    q = torch.ones(1, 1, 16, 16)

    def run() -> None:
        assert torch.allclose(flex_attention(q, q, q, score_mod=lambda score, *_: score), q)
        assert torch.compile(lambda x: x + x, backend="eager")(q).equal(2.0 * q)

    assert watch(run) == []


def test_nothing_is_noted_while_no_module_is_read() -> None:
    assert watch(lambda: torch.empty(4) + 1.0, inside=None) == []


@pytest.mark.parametrize(
    ("inside", "is_told"),
    [(INSIDE, True), ({("forward", "layers.1.moe")}, False), ({("backward", "layers.0.moe")}, False)],
)
def test_it_is_the_cause_where_it_is_read_inside_of_the_module_that_goes_wrong(
    inside: frozenset[tuple[str, str]], is_told: bool
) -> None:
    right = draw(2, 4, 3)
    tensor, inputs = make_origin(right, 0.0 * right, 0.0 * right)
    read = UnwrittenRead(SITE, SITE, (4, 2), frozenset(inside))
    inputs.unwritten = {0: [], 1: [read]}
    explanation = examine("unwritten", tensor, inputs).explanation
    assert (explanation is not None) is is_told
    if explanation is not None:
        assert explanation.cause is Cause.UNWRITTEN
        assert explanation.operation == Unwritten(allocated_at=SITE, read_at=SITE, shape=(4, 2), ranks=(1,))
