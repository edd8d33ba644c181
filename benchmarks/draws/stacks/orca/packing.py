"""Attention's inputs for packed rows: documents, places and positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FIRST = 8  # tokens below it begin a document


@dataclass(frozen=True)
class Context:
    """Of (b, s) tokens: `documents` by number, `places` (s) in the row, `positions` in the document.

    `key_documents` and `key_places` are those of the keys. `real` tokens are no padding. `draw` seeds dropout.
    """

    documents: Tensor
    places: Tensor
    positions: Tensor
    key_documents: Tensor
    key_places: Tensor
    tokens: Tensor | None = None
    real: Tensor | None = None
    draw: Draw | None = None

    def mask(self, window: int = 0) -> Tensor:
        """Return the mask (b, s, keys) of the keys that each query sees."""
        return make_mask(self.documents, self.places, self.key_documents, self.key_places, window)

    def dropped(self, share: float) -> Tensor:
        """Return a dropout mask over tokens (b, s, 1) from the next draw, divided by 1 - `share`."""
        mixed = (
            self.tokens * 2654435761 + self.positions * 40503 + self.draw.next() * 69069
        )  # anchor: dropout
        return (mixed.remainder(1000) >= 1000 * share)[..., None] / (1 - share)


class Draw:
    """Seeds from a custom generator: each block of a pass gets a different one."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> int:
        return int(torch.randint(2**20, (), generator=self.generator))


def make_mask(
    documents: Tensor, places: Tensor, key_documents: Tensor, key_places: Tensor, window: int
) -> Tensor:
    distance = places[:, None] - key_places
    seen = distance >= 0
    if window:
        seen = seen & (distance < window)  # anchor: window
    return seen & (documents[:, :, None] == key_documents[:, None])  # anchor: documents


def find_documents(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the document number of each token, and the position in its document."""
    starts = tokens < FIRST  # anchor: documents positions
    documents = starts.cumsum(1)  # anchor: documents
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = torch.where(starts, places, 0).cummax(1).values  # anchor: positions
    return documents, places - begins  # anchor: positions


def pack(tokens: Tensor, targets: Tensor | None = None) -> Context:
    """Return the context of whole rows."""
    documents, positions = find_documents(tokens)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    real = None if targets is None else targets != -100
    return Context(documents, places, positions, documents, places, tokens, real)


def with_draw(context: Context, seed: int | None) -> Context:
    return context if seed is None else replace(context, draw=Draw(seed))
