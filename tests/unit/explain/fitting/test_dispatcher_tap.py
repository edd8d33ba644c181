"""Reads of an MoE block's dispatcher: tokens in and out, and the gradient through experts alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeverify.model.dispatcher import Overlapping
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.train.clipping import gradient_norm
from moeverify.train.module_taps import tap_dispatcher


class _Doubling(Overlapping):
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: object) -> Tensor:
        if self.meanwhile is not None:
            self.meanwhile()
        return 2 * x


def test_a_tapped_dispatcher_gives_the_same_and_shows_both_ends() -> None:
    seen: list[tuple[str, Tensor]] = []
    called: list[bool] = []

    def read(end: str, value: Tensor) -> Tensor:
        seen.append((end, value))
        return value

    tapped = tap_dispatcher(_Doubling(), read)
    assert isinstance(tapped, Overlapping)
    tapped.meanwhile = lambda: called.append(True)
    x = torch.ones(3, 2)
    output = tapped(x, torch.zeros(3, 1), torch.ones(3, 1), lambda rows, counts: rows)
    assert torch.equal(output, 2 * x)
    assert [end for end, _ in seen] == ["input", "output"]
    assert called == [True]


def test_a_missing_gradient_counts_as_zero_in_the_norm() -> None:
    shards = []
    for name, value in (("a", 3.0), ("b", None)):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if value is None else torch.tensor([value, 4.0])
        shards.append(LocalShard(name, parameter, Region.whole((2,))))
    assert float(gradient_norm(shards)) == 5.0
