"""Heads that are read in another layout on their way between ranks, and their gradient in the backward pass alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replays import ZIGZAG, Heads, name_changes
from torch import Tensor

Read = Callable[[Tensor], Tensor]


def on_each_rank(change: Read) -> Read:
    """Return heads (B, S, N, D) of which each of two ranks reads its chunk otherwise."""

    def read(x: Tensor) -> Tensor:
        found = torch.empty_like(x)
        for part in ZIGZAG:
            found[:, list(part)] = change(x[:, list(part)])
        return found

    return read


def gathered(x: Tensor) -> Tensor:
    """Return heads that came as [ranks, batch, ...] and are taken for [batch, ranks, ...]."""
    order = [position for part in ZIGZAG for position in part]
    chunks = torch.stack([x[:, list(part)] for part in ZIGZAG])
    found = torch.empty_like(x)
    found[:, order] = chunks.reshape(x.shape)
    return found


READS: list[tuple[str, Read]] = [
    ("sequence-first", on_each_rank(lambda x: x.transpose(0, 1).reshape(x.shape))),
    ("heads-first", on_each_rank(lambda x: x.transpose(1, 2).reshape(x.shape))),
    ("ranks-first", gathered),
]


@pytest.mark.parametrize(("way", "read"), READS, ids=[way for way, _ in READS])
@pytest.mark.parametrize("what", ["keys", "values", "all"])
def test_heads_that_are_read_in_another_layout(way: str, read: Read, what: str) -> None:
    heads = Heads()
    given = {"k": heads.turn(heads.k), "v": heads.v, "q": heads.turn(heads.q)}
    read_otherwise = {"keys": "k", "values": "v", "all": "qkv"}[what]
    wrong = {name: read(x) if name in read_otherwise else x for name, x in given.items()}

    def compute(rank: int, own: Tensor) -> Tensor:
        del rank
        return heads.attend(own, k=wrong["k"], v=wrong["v"], q=wrong["q"][:, own])

    found = heads.explain(compute)
    assert found is not None
    assert [[(c.part, c.way, c.name) for c in changes] for changes in found.variants] == [
        [("layout", way, what)]
    ]


@pytest.mark.parametrize(("way", "read"), READS, ids=[way for way, _ in READS])
def test_a_gradient_that_is_read_in_another_layout(way: str, read: Read) -> None:
    heads = Heads()

    def compute(rank: int, own: Tensor, expected: Tensor, gradient: Tensor) -> Tensor:
        del rank, expected
        wrong = read(gradient.unflatten(-1, (-1, heads.v.shape[-1]))).flatten(2)
        return heads.pull_back("v", wrong)[:, own]

    assert name_changes(heads.explain_gradient("v", compute)) == [[("gradient-layout", way)]]


def test_heads_in_an_order_that_is_no_layout_are_not_explained() -> None:
    heads = Heads()
    order = torch.tensor([3, 1, 2, 0, 5, 4, 7, 6])
    keys = heads.turn(heads.k)[:, order].flip(-1)

    def compute(rank: int, own: Tensor) -> Tensor:
        del rank
        return heads.attend(own, k=keys)

    assert not name_changes(heads.explain(compute))
