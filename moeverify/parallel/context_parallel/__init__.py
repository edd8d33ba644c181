"""Context parallelism: the positions of a sequence are split over the ranks of the cp axis.

Each implementation is a module of this package with the name of its `layout.context_parallel` option. It
defines how positions are split, an attention core that reaches the keys and values of all ranks, and the
rules for combining it with other options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moeverify.cases.axes.split import IN_ZIGZAG, Positions, PositionSplit
from moeverify.cases.choice import Implementation, Modules
from moeverify.cases.rule import MODEL_OF_LAYOUT, blame, experts, own_model, reading, round_up
from moeverify.cases.schema import Case, ContextParallel
from moeverify.errors import Problem
from moeverify.seams import seam

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.attention import Core
    from moeverify.parallel.ddp import Accumulate


class ContextVariant(Implementation):
    """One implementation of context parallelism."""

    split: PositionSplit = IN_ZIGZAG

    def make_core(self, group: ProcessGroup) -> Core:
        """Return the attention core for a rank of the cp axis; `group` has the ranks of that axis.

        The core has the signature of `moeverify.model.attention.Core` and receives the queries, keys and
        values of this rank's positions: q (B, s, Nq, D), k (B, s, Nkv, D), v (B, s, Nkv, Dv), positions (B,
        s) -> (B, s, Nq, Dv).
        """
        raise NotImplementedError

    def surround(self, accumulate: Accumulate, mesh: DeviceMesh, device: torch.device) -> Accumulate:
        """Return `accumulate`, extended by any context the core needs around a micro-batch.

        The context covers the forward and the backward pass. `mesh` has the single axis cp.
        """
        return accumulate


CONTEXT_PARALLEL: Modules[ContextVariant] = Modules("layout.context_parallel", __name__)


def split_positions(seq_len: int, num_ranks: int, rank: int, kind: ContextParallel) -> Positions:
    """Return the positions of the sequence that a rank of the cp axis processes, in its local order.

    Example: `split_positions(8, 2, 0, "ring")` is (0, 1, 6, 7): a zigzag.
    """
    if num_ranks == 1:
        return range(seq_len)
    return CONTEXT_PARALLEL.find(kind).split.cut(seq_len, num_ranks, rank)


@seam
def apply_context_parallel(model: nn.Module, kind: ContextParallel, group: ProcessGroup) -> None:
    """Replace the core of every attention module, so that queries reach the keys and values of all ranks.

    The model must then be called with this rank's tokens and their positions in the whole sequence.
    """
    from moeverify.model.attention import Attention
    from moeverify.model.mla import LatentAttention

    core = CONTEXT_PARALLEL.find(kind).make_core(group)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = core


def _count_chunks(case: Case) -> int:
    """Return the number of equal chunks that a row of `seq_len` positions is cut into."""
    layout = case.layout
    return (
        1
        if layout.cp == 1
        else layout.cp * CONTEXT_PARALLEL.find(layout.context_parallel).split.chunks_per_rank
    )


@reading("layout.cp", "layout.context_parallel", "recipe.data.seq_len", "layout.parallelize")
def whole_chunks(case: Case) -> Iterator[Problem]:
    """Each context rank processes an equal share of every row."""
    length, chunks = case.recipe.data.seq_len, _count_chunks(case)
    if own_model(case) is not None and length % chunks:
        unit = CONTEXT_PARALLEL.find(case.layout.context_parallel).split.unit
        remedy = f"set recipe.data.seq_len to a multiple of {chunks}, such as {round_up(length, chunks)}"
        yield blame(
            "layout.cp", f"recipe.data.seq_len {length} is not divisible by {chunks} ({unit})", remedy
        )


@reading(
    *(f"layout.{name}" for name in ("cp", "tp", "ep", "etp", "context_parallel", "sequence_parallel")),
    "recipe.data.seq_len",
    *MODEL_OF_LAYOUT,
)
def whole_slices(case: Case) -> Iterator[Problem]:
    """Where tp slices positions, each tensor rank takes an equal part of a context rank's positions."""
    layout, length, chunks = case.layout, case.recipe.data.seq_len, _count_chunks(case)
    is_sliced = layout.sequence_parallel or (experts(case) is not None and layout.slices_tokens)
    if own_model(case) is None or length % chunks or not is_sliced:
        return
    if length // layout.cp % layout.tp:
        path = "layout.sequence_parallel" if layout.sequence_parallel else "layout.tp"
        why = "sequence_parallel" if layout.sequence_parallel else f"etp {layout.expert_tp}"
        per_rank = f" / cp {layout.cp}" if layout.cp > 1 else ""
        message = f"recipe.data.seq_len {length}{per_rank} is not divisible by tp {layout.tp}, as {why} needs"
        unit = math.lcm(chunks, layout.cp * layout.tp)
        remedy = f"set recipe.data.seq_len to a multiple of {unit}, such as {round_up(length, unit)}"
        yield blame(path, message, remedy)


POSITION_RULES = (whole_chunks, whole_slices)
