"""Replays of attention: ranks that merge what they see of each other's keys in a wrong way."""

from __future__ import annotations

import pytest
import torch
from replays import LENGTH, ROWS, ZIGZAG, Heads, name_changes
from torch import Tensor

from moeverify.diagnose.replay.merging import STEPS


def merge(heads: Heads, rank: int, own: Tensor, way: str = "") -> Tensor:
    """Return the heads (b, s, N, D) of a rank's queries: a loop over two ranks' keys, written out for each head."""
    q, k = heads.turn(heads.q)[:, own], heads.turn(heads.k)
    out = torch.zeros(ROWS, len(own), q.shape[2], heads.v.shape[-1], dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        largest = mixed = total = torch.zeros(0)
        for turn in range(2):
            keys = torch.tensor(ZIGZAG[(rank - turn) % 2])
            scores = q[:, :, head] @ k[:, keys, head // group].transpose(1, 2) * 8**-0.5
            scores = scores.masked_fill(keys > own.unsqueeze(1), -torch.inf)
            best = scores.amax(-1, keepdim=True)
            best = torch.maximum(best, largest) if turn else best
            share = (scores - best).exp()
            added, weight = share @ heads.v[:, keys, head // group], share.sum(-1, keepdim=True)
            if way == "denominator-mean":
                weight = share.mean(-1, keepdim=True)
            if turn:
                shrink = (largest - best).exp()
                above = {
                    "numerator-last": added,
                    "numerator-first": mixed * shrink,
                    "numerator-factor": added + shrink,
                    "numerator-opposite": added + mixed / shrink,
                    "both-opposite": added + mixed / shrink,
                }
                below = {
                    "denominator-first": total * shrink,
                    "denominator-factor": weight + shrink,
                    "denominator-opposite": weight + total / shrink,
                    "both-opposite": weight + total / shrink,
                }
                added = above.get(way, added + mixed * shrink)
                weight = below.get(way, weight + total * shrink)
            largest, mixed, total = best, added, weight
        power = {"undivided": 0, "divided-twice": 2}.get(way, 1)
        out[:, :, head] = mixed / total**power
    return out


def test_the_loop_that_is_written_out_is_attention() -> None:
    heads = Heads()
    for rank, part in enumerate(ZIGZAG):
        own = torch.tensor(part)
        assert torch.allclose(merge(heads, rank, own), heads.attend(own), atol=1e-12)
    assert sum(map(len, ZIGZAG)) == LENGTH


@pytest.mark.parametrize("way", STEPS)
def test_a_step_of_the_loop_that_is_otherwise_is_named(way: str) -> None:
    heads = Heads()
    found = heads.explain(lambda rank, own: merge(heads, rank, own, way))
    assert [("merge", way)] in (name_changes(found) or [])
    assert found is not None
    assert found.ranks == ()
