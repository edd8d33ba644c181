"""How many token copies each expert got in a run: what a placement of experts is computed from."""

from __future__ import annotations

from moeverify.results.record import Record


class ExpertLoad(Record):
    """Token copies by step, MoE layer, expert and source rank: those that were sent, padding included.

    `layers` are the indices of the blocks with experts. Sources are the ranks of ep, over all copies of its group;
    one source where experts are not spread. Shape: copies (steps, layers, num_experts, num_sources).
    """

    layers: tuple[int, ...]
    num_experts: int
    num_sources: int
    top_k: int
    copies: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
