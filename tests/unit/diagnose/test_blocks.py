"""Attention that is made block by block: merges that are otherwise, each written as a loop of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from own_models import LENGTH as OWN_LENGTH
from own_models import Layer, Mixer, find_mistakes, only
from torch import Tensor
from torch.nn import functional as F

from moeverify.diagnose.own.blocks import OTHERS_TIMES, number_turns, weigh_blocks
from moeverify.diagnose.own.merging import STEPS, merge_by_steps

LENGTH = 8
ZIGZAG = ((0, 1, 6, 7), (2, 3, 4, 5))
OWNER = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])
VISIBLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

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


def make_scores() -> Tensor:
    return torch.randn(2, 3, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def merge(weigh: Weights) -> Tensor:
    """Return the weights of the values where each rank's queries merge its own chunk with the other rank's."""
    scores, found = make_scores(), torch.zeros(2, 3, LENGTH, LENGTH, dtype=torch.float64)
    for rank, part in enumerate(ZIGZAG):
        rows, sums, shares = list(part), [], []
        for turn in range(2):
            keys = list(ZIGZAG[(rank - turn) % 2])
            seen = scores[..., rows, :][..., keys].masked_fill(~VISIBLE[rows][:, keys], -torch.inf)
            sums.append(seen.logsumexp(-1, keepdim=True))
            shares.append((keys, seen.softmax(-1).nan_to_num()))
        for (keys, share), times in zip(shares, weigh(*sums), strict=True):
            found[..., torch.tensor(rows)[:, None], torch.tensor(keys)] = share * times
    return found


@pytest.mark.parametrize(
    ("weigh", "rule", "number"),
    [
        (_share, "", 1.0),
        (_share_by_two, "base-2", 1.0),
        (_forget_rescale, "earlier-whole", 1.0),
        (_exchange, "exchanged", 1.0),
        (_count_thrice, OTHERS_TIMES, 3.0),
    ],
)
def test_chunks_of_ranks_are_merged_by_a_rule(weigh: Weights, rule: str, number: float) -> None:
    turns = number_turns(OWNER.unsqueeze(-1), OWNER, "", 2)
    found = weigh_blocks(make_scores(), VISIBLE, turns, rule, number)
    assert torch.allclose(found, merge(weigh), atol=1e-12)


def merge_in_a_loop(way: str) -> Tensor:
    """Return the weights of the values: a loop over two ranks' keys, with a step of it otherwise."""
    masked = make_scores().masked_fill(~VISIBLE, -torch.inf)
    found = torch.zeros_like(masked)
    for rank, part in enumerate(ZIGZAG):
        own = torch.tensor(part)
        largest = mixed = total = torch.zeros(0)
        for turn in range(2):
            scores = masked[..., own, :].masked_fill((rank - turn) % 2 != OWNER, -torch.inf)
            best = scores.amax(-1, keepdim=True)
            best = torch.maximum(best, largest) if turn else best
            share = (scores - best).exp()
            weight = share.sum(-1, keepdim=True) / (len(part) if way == "denominator-mean" else 1)
            if turn:
                shrink = (largest - best).exp()
                above = {
                    "numerator-last": share,
                    "numerator-first": mixed * shrink,
                    "numerator-opposite": share + mixed / shrink,
                    "both-opposite": share + mixed / shrink,
                }
                below = {
                    "denominator-first": total * shrink,
                    "denominator-factor": weight + shrink,
                    "denominator-opposite": weight + total / shrink,
                    "both-opposite": weight + total / shrink,
                }
                share = above.get(way, share + mixed * shrink)
                weight = below.get(way, weight + total * shrink)
            largest, mixed, total = best, share, weight
        power = {"undivided": 0, "divided-twice": 2}.get(way, 1)
        found[..., own, :] = mixed / total**power
    return found


@pytest.mark.parametrize("way", STEPS)
def test_a_step_of_the_loop_is_otherwise(way: str) -> None:
    masked = make_scores().masked_fill(~VISIBLE, -torch.inf)
    found = merge_by_steps(masked, OWNER.unsqueeze(-1), OWNER, 2, way)
    assert torch.allclose(found, merge_in_a_loop(way), atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_without_a_rule_blocks_make_one_softmax(size: int) -> None:
    scores = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    turns = (torch.arange(6) // size).flip(0).expand(6, 6)
    right = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    assert torch.allclose(weigh_blocks(scores, visible, turns, ""), right, atol=1e-14)


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
