"""An exchange keeps no memory: on a GPU its rows are hundreds of megabytes in each step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeverify.parallel.collectives import Exchange


@pytest.fixture(autouse=True)
def only_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # type: ignore[no-untyped-call]
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    dist.destroy_process_group()


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_an_exchange_moved_is_free_without_a_search_for_circles(is_trained: bool) -> None:
    assert dist.group.WORLD is not None
    before = torch.ones(8, 4, dtype=torch.float64, requires_grad=is_trained) * 2
    exchange = Exchange(before, [8], [8], dist.group.WORLD)
    rows = exchange.finish()
    found = [weakref.ref(thing) for thing in (before, rows, exchange)]
    if is_trained:
        rows.sum().backward()
    del before, rows, exchange
    assert [each() for each in found] == [None, None, None]
