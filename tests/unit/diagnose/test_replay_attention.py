"""Replays of attention: variants that ranks may compute are named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import pytest
import torch
from replays import LENGTH, ROWS, ZIGZAG, Heads, name_changes
from torch import Tensor

from moeverify.model.attention import attend

Compute = Callable[[Heads, Tensor], Tensor]
ARRIVAL = torch.tensor(sum(ZIGZAG, ()))


@cache
def make_heads() -> Heads:
    return Heads()


def _own_values(heads: Heads, own: Tensor) -> Tensor:
    other = torch.tensor([position for position in range(LENGTH) if position not in own.tolist()])
    keys = torch.cat([heads.turn(heads.k)[:, own], heads.turn(heads.k)[:, other]], dim=1)
    values = heads.v[:, own].repeat(1, 2, 1, 1)
    return heads.attend(own, k=keys, v=values, key_positions=torch.cat([own, other]).expand(ROWS, LENGTH))


def _mean_of_chunks(heads: Heads, own: Tensor) -> Tensor:
    found = []
    for part in ZIGZAG:
        keys = {name: value[:, part] for name, value in (("k", heads.turn(heads.k)), ("v", heads.v))}
        value = heads.attend(own, **keys, key_positions=heads.positions[:, part])
        found.append(value)
    count = sum(value.isfinite().double() for value in found)
    return sum(value.nan_to_num() for value in found) / count


def _turned(heads: Heads, own: Tensor, at: Tensor) -> Tensor:
    return heads.attend(
        own, q=heads.turn(heads.q, at.expand(ROWS, LENGTH)), k=heads.turn(heads.k, at.expand(ROWS, LENGTH))
    )


LOCAL = torch.tensor([ZIGZAG[0].index(p) if p in ZIGZAG[0] else ZIGZAG[1].index(p) for p in range(LENGTH)])
OWNER = torch.tensor([int(p in ZIGZAG[1]) for p in range(LENGTH)])
IN_TURN = OWNER + 2 * LOCAL
VARIANTS: dict[str, tuple[Compute, tuple[str, str]]] = {
    "no mask": (lambda h, own: h.attend(own, key_positions=h.positions * 0), ("mask", "none")),
    "next token": (lambda h, own: h.attend(own, key_positions=h.positions - 1), ("mask", "offset")),
    "window": (
        lambda h, own: torch.stack(
            [
                h.attend(
                    own[n : n + 1], key_positions=torch.where(h.positions > own[n] - 3, h.positions, 99)
                )[:, 0]
                for n in range(4)
            ],
            dim=1,
        ),
        ("reach", "window"),
    ),
    "own chunk": (
        lambda h, own: h.attend(own, k=h.turn(h.k)[:, own], v=h.v[:, own], key_positions=h.positions[:, own]),
        ("reach", "own"),
    ),
    "arrival": (
        lambda h, own: h.attend(own, k=h.turn(h.k)[:, ARRIVAL], v=h.v[:, ARRIVAL]),
        ("mask", "arrival-of-key"),
    ),
    "own values": (_own_values, ("values", "own")),
    "rotary positions": (lambda h, own: _turned(h, own, LOCAL), ("rotation", "place")),
    "positions in turn": (lambda h, own: _turned(h, own, IN_TURN), ("rotation", "in-turn")),
    "keys in turn": (
        lambda h, own: h.attend(own, k=h.turn(h.k, IN_TURN.expand(ROWS, LENGTH))),
        ("key-rotation", "in-turn"),
    ),
    "no rotation of keys": (lambda h, own: h.attend(own, k=h.k), ("key-rotation", "none")),
    "heads": (
        lambda h, own: h.attend(own, k=h.turn(h.k).repeat(1, 1, 2, 1), v=h.v.repeat(1, 1, 2, 1)),
        ("heads", "modulo"),
    ),
    "output heads": (lambda h, own: h.attend(own)[:, :, [1, 0, 3, 2, 5, 4, 7, 6]], ("outputs", "next")),
    "traded heads": (lambda h, own: h.attend(own)[:, :, [4, 5, 6, 7, 0, 1, 2, 3]], ("outputs", "next-group")),
    "heads of four": (
        lambda h, own: h.attend(own)[:, :, [6, 7, 4, 5, 2, 3, 0, 1]],
        ("outputs", "reversed-groups"),
    ),
    "heads before": (
        lambda h, own: h.attend(own)[:, :, [6, 7, 0, 1, 2, 3, 4, 5]],
        ("outputs", "previous-group"),
    ),
    "scale": (lambda h, own: h.attend(own, q=h.turn(h.q) * 8**-0.5), ("scale", "width")),
    "other scale": (lambda h, own: h.attend(own, q=h.turn(h.q) * 0.73), ("scale", "factor")),
    "root": (lambda h, own: h.attend(own, q=h.turn(h.q) * (8 / 48) ** 0.5), ("scale", "factor")),
    "chunks": (_mean_of_chunks, ("softmax", "mean-of-chunks")),
}


# What gives the same numbers, always or under two ranks: a mask against the order of keys, and that order of both.
RIVALS = {
    "arrival": [("keys-and-values", "arrival")],
    "scale": [("scale", "all-heads")],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_both_ranks_compute_is_named(name: str) -> None:
    heads, (compute, change) = make_heads(), VARIANTS[name]
    found = heads.explain(lambda rank, own: compute(heads, own))
    assert name_changes(found) == [[change], *([rival] for rival in RIVALS.get(name, []))]
    assert found is not None
    assert (found.ranks, found.blocks, found.residual < 1e-10) == ((), (), True)


def test_two_parts_may_be_otherwise_at_once() -> None:
    heads = make_heads()
    found = heads.explain(lambda rank, own: heads.attend(own, q=heads.turn(heads.q) * 8**-0.5, k=heads.k))
    assert name_changes(found) == [
        [("scale", way), ("key-rotation", "none")] for way in ("width", "all-heads")
    ]


def test_a_variant_of_one_rank_or_one_head_is_said_of_these_alone() -> None:
    heads = make_heads()

    def on_one_rank(rank: int, own: Tensor) -> Tensor:
        return heads.attend(own) if rank == 0 else heads.attend(own, key_positions=heads.positions * 0)

    def in_one_head(rank: int, own: Tensor) -> Tensor:
        right = heads.attend(own)
        right[:, :, 5] = heads.attend(own, key_positions=heads.positions * 0)[:, :, 5]
        return right

    found = heads.explain(on_one_rank)
    # The other rank has the last positions: what a mask of whole chunks hides there is nothing.
    assert name_changes(found) == [[("mask", "none")], [("mask", "ranks")]]
    assert found is not None
    assert found.ranks == (1,)
    found = heads.explain(in_one_head)
    assert (name_changes(found), found and found.blocks) == ([[("mask", "none")]], (5,))


def test_ranks_that_compute_differently_have_no_variant() -> None:
    heads = make_heads()

    def compute(rank: int, own: Tensor) -> Tensor:
        return heads.attend(own, key_positions=heads.positions * 0) if rank else heads.attend(own, k=heads.k)

    assert name_changes(heads.explain(compute)) == []


@pytest.mark.parametrize("kind", ["noise", "rounding", "other weights"])
def test_what_is_no_variant_is_not_named(kind: str) -> None:
    heads = make_heads()

    def compute(rank: int, own: Tensor) -> Tensor:
        right = heads.attend(own)
        if kind == "noise":
            return right + 0.1 * torch.randn(
                right.shape, dtype=right.dtype, generator=torch.Generator().manual_seed(rank)
            )
        return right.bfloat16().double() if kind == "rounding" else heads.attend(own, v=heads.v.roll(3, -1))

    assert name_changes(heads.explain(compute)) == []


def test_in_float32_the_rounding_of_the_ranks_is_allowed() -> None:
    heads = make_heads()
    found = heads.explain(
        lambda rank, own: attend(
            *(each.float() for each in (heads.turn(heads.q)[:, own], heads.turn(heads.k), heads.v)),
            own.expand(ROWS, 4),
            heads.positions * 0,
        ),
        torch.float32,
        3e-4,
    )
    assert name_changes(found) == [[("mask", "none")]]


def test_a_formula_that_does_not_give_the_golden_says_nothing() -> None:
    heads = Heads()
    heads.formula.v = heads.formula.v + 1e-6
    assert heads.explain(lambda rank, own: heads.attend(own, key_positions=heads.positions * 0)) is None


@pytest.mark.parametrize("of", ["k", "v"])
def test_queries_that_are_left_out_of_what_is_passed_back(of: Literal["k", "v"]) -> None:
    heads = make_heads()
    found = heads.explain_gradient(
        of, lambda rank, own, right, gradient: heads.pull_back(of, gradient, own)[:, own]
    )
    assert name_changes(found) == [[("queries", "own")]]
    found = heads.explain_gradient(
        of, lambda rank, own, right, gradient: right[:, torch.tensor(ZIGZAG[1 - rank])]
    )
    # Of values it is the same to read those of the other rank.
    assert name_changes(found) == [[("sums", "of-rank")], *([[("values", "of-rank")]] if of == "v" else [])]


def test_a_mask_that_the_backward_pass_alone_lacks() -> None:
    heads = make_heads()
    found = heads.explain_gradient(
        "q", lambda rank, own, right, gradient: heads.pull_back("q", gradient, mask=0)[:, own]
    )
    assert name_changes(found) == [[("mask", "none")]]
    found = heads.explain_gradient("q", lambda rank, own, right, gradient: 2.1 * right[:, own])
    assert name_changes(found) == []
