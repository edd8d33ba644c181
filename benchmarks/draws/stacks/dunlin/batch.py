"""What the model needs to know of a micro-batch: documents, weights of tokens, the tokens after the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dunlin.config import Losses
from dunlin.topo import Topology
from dunlin.wire import gather0


@dataclass
class Batch:
    """Tensors are (positions, rows) of this rank, `all_documents` those of the whole rows."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    starts: Tensor  # whether a document begins
    documents: Tensor
    all_documents: Tensor
    next_tokens: Tensor
    ahead: Tensor  # targets after the next
    ahead_weights: Tensor
    first: int  # place of the first position in the row


def shift(x: Tensor, fill: int, topo: Topology) -> Tensor:
    """Return for each position the value of the following one, `fill` behind the end of a row."""
    cp = topo.cp
    edges = gather0(x[:1], cp)
    if cp.size == 1 or (cp.is_last and not topo.trial("ahead-wrap")):  # plant: ahead-wrap
        follow = torch.full_like(x[:1], fill)  # anchor: ahead-fill
    else:
        place = (cp.index + 1) % cp.size
        follow = edges[place : place + 1]  # anchor: ahead-edge
        if topo.trial("ahead-roll"):
            follow = x[:1]  # plant: ahead-roll
    return torch.cat([x[1:], follow])


def number_documents(starts: Tensor, topo: Topology) -> Tensor:
    own = starts.long().cumsum(0)
    counts = gather0(own[-1:], topo.cp)
    before = counts[: topo.cp.index].sum(0)  # anchor: documents-before
    if topo.mode == "documents-inclusive" and topo.cp.size > 1:
        before = counts.cumsum(0)[topo.cp.index]  # plant: documents-inclusive
    return own + before


def weigh(targets: Tensor, losses: Losses, dtype: torch.dtype) -> Tensor:
    weights = torch.where(targets < losses.stops, losses.stop_weight, 1.0).to(dtype)
    return weights.masked_fill(targets < 0, 0.0)


def prepare(tokens: Tensor, targets: Tensor, losses: Losses, topo: Topology, dtype: torch.dtype) -> Batch:
    tokens, targets = tokens.t().contiguous(), targets.t().contiguous()
    starts = tokens < losses.stops
    documents = number_documents(starts, topo)
    ahead = shift(targets, -100, topo)
    return Batch(
        tokens=tokens,
        targets=targets,
        weights=weigh(targets, losses, dtype),
        starts=starts,
        documents=documents,
        all_documents=gather0(documents, topo.cp),
        next_tokens=shift(tokens, 0, topo),
        ahead=ahead,
        ahead_weights=weigh(ahead, losses, dtype),
        first=topo.cp.index * len(tokens),
    )
