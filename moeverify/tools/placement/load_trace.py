"""The load trace of a run: token copies by step, MoE layer, expert and source rank.

Notation: T steps, L MoE layers, E experts, R source ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moeverify.errors import CaseError, Problem
from moeverify.tools.placement.cluster import Cluster
from moeverify.tools.placement.sharing import FloatArray


@dataclass(frozen=True)
class TraceHeader:
    """Metadata of a trace.

    `layers` holds the index of each MoE layer among the model's blocks. `num_sources` is the number of
    source ranks of tokens, 1 if the trace does not distinguish them. `model` is any name; traces of models
    with different names are not mixed. `top_k` is the number of experts per token, 0 if unknown.

    Raises: CaseError with all problems.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_sources: int = 1
    model: str = ""
    top_k: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not self.layers:
            problems.append(Problem("a trace needs at least one MoE layer", path="layers"))
        if len(set(self.layers)) < len(self.layers) or any(layer < 0 for layer in self.layers):
            problems.append(
                Problem(f"MoE layers {self.layers}: expected different indices from 0", path="layers")
            )
        for name, least in (("num_experts", 1), ("num_sources", 1), ("top_k", 0)):
            if getattr(self, name) < least:
                message = f"expected at least {least}, got {getattr(self, name)}"
                problems.append(Problem(message, path=name))
        if problems:
            raise CaseError(problems)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (L, E, R), the shape of one step."""
        return len(self.layers), self.num_experts, self.num_sources


@dataclass(frozen=True)
class LoadTrace:
    """A trace in memory: `steps` (T) and `copies` (T, L, E, R), nonnegative token copies.

    `num_lost_bytes` is the size of an incomplete last step that a crash left in the file; it is not in
    `copies`.
    """

    header: TraceHeader
    steps: tuple[int, ...]
    copies: npt.NDArray[np.generic] = field(repr=False)
    num_lost_bytes: int = 0

    def take_last(self, number: int) -> LoadTrace:
        """Return the last steps of the trace."""
        return LoadTrace(self.header, self.steps[-number:], self.copies[-number:], self.num_lost_bytes)


@dataclass(frozen=True)
class TokenLoad:
    """Token copies (L, E, R) by MoE layer, expert and source rank, summed over steps.

    With `is_even` every source sends the same number to each expert, so k replicas of an expert on one node
    get exactly 1/k of its copies each.
    """

    copies: FloatArray
    is_even: bool

    @property
    def by_expert(self) -> FloatArray:
        """Return token copies (L, E)."""
        total: FloatArray = self.copies.sum(-1)
        return total

    def take(self, layers: Sequence[int] | slice) -> TokenLoad:
        """Return the load of some positions on the layer dim."""
        return TokenLoad(self.copies[layers], self.is_even)


def spread_evenly(by_expert: FloatArray, num_ranks: int) -> TokenLoad:
    """Return the load (L, E, R) of copies (L, E) with unknown sources: every rank sends the same."""
    even = np.broadcast_to((by_expert / num_ranks)[..., None], (*by_expert.shape, num_ranks))
    return TokenLoad(even, is_even=True)


def sum_steps(trace: LoadTrace, cluster: Cluster) -> TokenLoad:
    """Return the load of all steps of a trace on the ranks of a cluster.

    Sources are used when the trace has as many as the cluster has ranks. Otherwise every rank is assumed to
    send the same.
    """
    total = trace.copies.sum(0, dtype=np.float64)
    if trace.header.num_sources == cluster.num_ranks > 1:
        return TokenLoad(total, is_even=False)
    return spread_evenly(total.sum(-1), cluster.num_ranks)


def iterate_steps(trace: LoadTrace, cluster: Cluster) -> Iterator[TokenLoad]:
    """Yield the load of each step, as in `sum_steps`."""
    for position in range(len(trace.steps)):
        yield sum_steps(LoadTrace(trace.header, (0,), trace.copies[position : position + 1]), cluster)
