"""Heads of a user's own attention that are split in another layout than on one device."""

from __future__ import annotations

import torch
from own_models import HEADS, WIDTH, Layer, Mixer, find_mistakes, only
from torch import Tensor
from torch.nn import functional as F


class _Heads(Mixer):
    """Attention of several heads; `turned` are those that are viewed as [heads, positions] at once."""

    turned: tuple[str, ...] = ()

    def split(self, x: Tensor, name: str) -> Tensor:
        if name in self.turned:
            return x.view(x.shape[0], HEADS, x.shape[1], WIDTH // HEADS).transpose(1, 2)
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keys = self.split(self.keys(x), "keys")
        values = self.split(self.values(x), "values")
        queries = keys * torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype)[:, None, None].cos()
        taken = (each.transpose(1, 2) for each in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(*taken, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(mixed), mixed


def _find(*turned: str) -> tuple[str, str, str]:
    def prepare(layer: Layer) -> None:
        layer.mixer.__class__ = _Heads

    def turn(layer: Layer) -> None:
        layer.mixer.turned = turned  # type: ignore[assignment]

    mistake = only(find_mistakes(turn, prepare=prepare))
    return mistake.name, mistake.way, mistake.after


def test_a_split_without_a_transposition_is_named_by_what_is_split() -> None:
    # The keys make the queries too, by what depends on the position: no operand of attention is in another layout.
    assert _find("keys") == ("view", "relaid:heads-last", "output:mixer.keys")


def test_splits_that_are_all_so_are_named_together() -> None:
    assert _find("keys", "values") == ("view", "relaid:heads-last", "")
