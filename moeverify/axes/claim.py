"""What an axis of a layout is said to divide. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["all", "experts", "others"]

EXPERTS = ".experts."
"""What the names of experts' parameters have in them."""


@dataclass(frozen=True)
class Claim:
    """That the tensors of a kind, or those of one part of the model, are divided over each of these groups of ranks.

    Of a parallel dim that cuts experts alone the other parameters say nothing, although the ranks of its groups
    may hold different shards of them for another reason; and the other way round.
    """

    kind: str
    groups: Sequence[Sequence[int]]
    part: Part = "all"

    def covers(self, key: tuple[int, str, str]) -> bool:
        """Return whether the claim is about this tensor."""
        _, kind, name = key
        return kind == self.kind and (self.part == "all" or (EXPERTS in name) == (self.part == "experts"))
