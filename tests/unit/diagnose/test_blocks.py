"""Attention that is made block by block: merges that are otherwise, each written as a loop of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from own_models import LENGTH as OWN_LENGTH
from own_models import Layer, Mixer, find_mistakes, only
from replays import LENGTH, ZIGZAG, Heads, name_changes
from torch import Tensor
from torch.nn import functional as F

from moeverify.diagnose.replay.blocks import weigh_blocks

Weights = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What is multiplied with what was summed up before and with a further block, from both logsumexps."""


def _share(before: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(before - block), torch.sigmoid(block - before)


def _share_by_two(before: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    old, new = torch.exp2(before), torch.exp2(block)
    return old / (old + new), new / (old + new)


def _forget_rescale(before: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(before), torch.sigmoid(block - before)


def _exchange(before: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(block - before), torch.sigmoid(before - block)


def _count_thrice(before: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    return _share(before, block + torch.tensor(3.0).log())


def merge(
    heads: Heads, rank: int, own: Tensor, weigh: Weights, *, centers: bool = False, hides: bool = True
) -> Tensor:
    """Return what a rank's queries make of its own chunk and of the other rank's: outputs and their logsumexps."""
    q = heads.turn(heads.q)[:, own]
    k, v = (each.repeat_interleave(2, 2) for each in (heads.turn(heads.k), heads.v))
    outputs, sums = [], []
    for turn in range(2):
        keys = torch.tensor(ZIGZAG[(rank - turn) % 2])
        part = k[:, keys]
        part = part - part.mean(1, keepdim=True) if centers else part
        scores = torch.einsum("bsnd,btnd->bnst", q, part) * 8**-0.5
        if hides or not turn:
            scores = scores.masked_fill(keys > own.unsqueeze(1), -torch.inf)
        sums.append(scores.logsumexp(-1, keepdim=True))
        outputs.append(torch.einsum("bnst,btnd->bnsd", scores.softmax(-1).nan_to_num(), v[:, keys]))
    old, new = weigh(*sums)
    return (old * outputs[0] + new * outputs[1]).transpose(1, 2)


def _explain(
    weigh: Weights, *, centers: bool = False, hides: bool = True
) -> list[list[tuple[str, str]]] | None:
    heads = Heads()
    return name_changes(
        heads.explain(lambda rank, own: merge(heads, rank, own, weigh, centers=centers, hides=hides))
    )


def test_the_right_merge_is_attention() -> None:
    heads = Heads()
    for rank, part in enumerate(ZIGZAG):
        own = torch.tensor(part)
        assert torch.allclose(merge(heads, rank, own, _share), heads.attend(own), atol=1e-12)


@pytest.mark.parametrize(
    ("weigh", "change"),
    [
        (_share_by_two, ("merge", "base-2")),
        (_forget_rescale, ("merge", "earlier-whole")),
        (_exchange, ("merge", "exchanged")),
        (_count_thrice, ("merge", "others-times")),
    ],
)
def test_weights_of_blocks_that_are_otherwise_are_named(weigh: Weights, change: tuple[str, str]) -> None:
    assert _explain(weigh) == [[change]]


def test_how_often_other_chunks_count_is_fitted() -> None:
    heads = Heads()
    found = heads.explain(lambda rank, own: merge(heads, rank, own, _count_thrice))
    assert found is not None
    assert [each.number for changes in found.variants for each in changes] == [pytest.approx(3.0, rel=1e-6)]


def test_a_logsumexp_without_what_was_taken_off_the_keys_is_named() -> None:
    assert _explain(_share, centers=True) == [[("merge", "less-mean")]]


def test_chunks_of_others_without_a_mask_are_named() -> None:
    assert _explain(_share, hides=False) == [[("mask", "of-own")]]


def test_weights_that_follow_no_rule_are_not_named() -> None:
    def by_sine(before: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.sigmoid((before - block).sin())
        return torch.where(torch.isfinite(share), share, 1.0), torch.where(
            torch.isfinite(share), 1 - share, 0.0
        )

    assert _explain(by_sine) == []


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_without_a_rule_blocks_make_one_softmax(size: int) -> None:
    scores = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    turns = (torch.arange(6) // size).flip(0).expand(6, 6)
    right = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    assert torch.allclose(weigh_blocks(scores, visible, turns, ""), right, atol=1e-14)


@pytest.mark.parametrize(("of", "way"), [("k", "delta-of-block"), ("q", "delta-of-block"), ("q", "own")])
def test_a_backward_pass_of_blocks_is_named(of: Literal["q", "k"], way: str) -> None:
    heads = Heads()

    def compute(rank: int, own: Tensor, expected: Tensor, gradient: Tensor) -> Tensor:
        leaves = {"q": heads.q.clone().requires_grad_(), "k": heads.k.clone().requires_grad_()}
        q, k = heads.turn(leaves["q"]), heads.turn(leaves["k"]).repeat_interleave(2, 2)
        v, owner = heads.v.repeat_interleave(2, 2), torch.zeros(LENGTH, dtype=torch.long)
        owner[list(ZIGZAG[1])] = 1
        with torch.no_grad():
            scores = torch.einsum("bsnd,btnd->bnst", q, k) * 8**-0.5
            hidden = torch.arange(LENGTH) > torch.arange(LENGTH)[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            back = torch.einsum("bsnd,btnd->bnst", gradient.unflatten(-1, (8, 8)), v)
            found = weights * (back - (weights * back).sum(-1, keepdim=True))
            if way == "delta-of-block":
                found = torch.zeros_like(found)
                for turn in range(2):
                    part = weights * (owner == turn)
                    product = (part * back).sum(-1, keepdim=True) / part.sum(-1, keepdim=True).clamp(
                        min=1e-300
                    )
                    found = found + part * (back - product)
            if way == "own":
                found = found * (owner[:, None] == owner)
        both = torch.einsum("bsnd,btnd->bnst", q, k) * 8**-0.5
        return torch.autograd.grad(both, leaves[of], found)[0][:, own]

    part = "keys-back" if way == "own" else "blocks-back"
    found = heads.explain_gradient(of, compute)
    assert [(part, way)] in (name_changes(found) or [])


class _InBlocks(Mixer):
    """Goes over blocks of keys as kernels do, and forgets to rescale what it has summed up when a block comes."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keys, values = self.first_norm(self.keys(x)), self.second_norm(self.values(x))
        scores = self.cap * torch.tanh(self.scaling * (keys @ keys.transpose(-1, -2)) / self.cap)
        scores = scores if mask is None else scores + mask
        hidden = torch.ones(OWN_LENGTH, OWN_LENGTH, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        largest = torch.full_like(scores[..., :1], -torch.inf)
        mixed, total = torch.zeros_like(values), torch.zeros_like(largest)
        for begin in range(0, OWN_LENGTH, 2):
            part = scores[..., begin : begin + 2]
            best = torch.maximum(largest, part.amax(-1, keepdim=True))
            share = (part - best).exp()
            mixed = mixed + share @ values[:, begin : begin + 2]
            total = total * (largest - best).exp() + share.sum(-1, keepdim=True)
            largest = best
        return self.out(F.silu(mixed / total)), scores


def test_a_merge_in_a_users_own_module_is_named_with_the_size_of_its_blocks() -> None:
    def divide(layer: Layer) -> None:
        layer.mixer.__class__ = _InBlocks

    mistake = only(find_mistakes(divide))
    assert (mistake.name, mistake.way, mistake.after) == ("softmax", "merged:softmax/ring-numerator", "2")
