"""Number of token copies per expert in a run, from which an expert placement is computed."""

from __future__ import annotations

from moeverify.results.record import Record


class ExpertLoad(Record):
    """Dispatched token copies by step, MoE layer, expert and source rank, including padding.

    `layers` are the indices of the MoE blocks. Sources are the ranks of ep, summed over all ep groups;
    there is one source if experts are not sharded. Shape: copies (steps, layers, num_experts, num_sources).
    """

    layers: tuple[int, ...]
    num_experts: int
    num_sources: int
    top_k: int
    copies: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
