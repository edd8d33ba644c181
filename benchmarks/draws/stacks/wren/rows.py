"""Packed rows: which document a token is of, where it stands in it, and which keys it sees."""

from dataclasses import dataclass

import torch

from wren.world import raw_gather


@dataclass
class Plan:
    place: torch.Tensor  # places in the row of this rank's tokens
    keys: torch.Tensor  # places in the row of keys, as they are gathered over `cp`
    doc: torch.Tensor  # (places, rows)
    first: torch.Tensor  # (places, rows): where the document of a place begins
    length: int  # of the whole row

    @property
    def position(self):
        """Return (tokens of this rank, rows) positions in documents."""
        return self.place[:, None] - self.first[self.place]


def places_of(rank, count, w):
    """Return the places of the `count` tokens that a rank of `cp` has."""
    if not w.zigzag:
        return torch.arange(count) + rank * count
    half = count // 2
    mirror = 2 * w.cp.size - 1 - rank
    return torch.cat([torch.arange(half) + rank * half, torch.arange(half) + mirror * half])


def read(tokens, c, w):
    """Make the plan for (rows, positions of this rank) tokens."""
    mine = tokens.t().contiguous()
    count = len(mine)
    length = count * w.cp.size
    keys = torch.cat([places_of(rank, count, w) for rank in range(w.cp.size)])  # anchor: key-places
    row = raw_gather(mine, w.cp)[keys.argsort()]
    starts = row % c.every == 0
    place = torch.arange(length)[:, None].expand_as(row)
    doc = starts.long().cumsum(0)  # anchor: documents
    first = torch.where(starts, place, 0).cummax(0).values
    if w.has("wren-documents-local"):
        doc = torch.cat([x.long().cumsum(0) for x in starts.split(count)])  # plant: wren-documents-local
    if w.has("wren-keys-in-order"):
        keys = torch.arange(length)  # plant: wren-keys-in-order
    return Plan(places_of(w.cp.rank, count, w), keys, doc, first, length)


def visible(plan, c, w, *, local):
    """Return (rows, queries, keys): the same document, not later, and for `local` layers near or a sink."""
    behind = plan.place[:, None] - plan.keys[None, :]
    doc, key_doc = plan.doc[plan.place].t(), plan.doc[plan.keys].t()
    seen = (doc[:, :, None] == key_doc[:, None, :]) & (behind >= 0)
    if not local:
        return seen
    key_place = plan.keys  # anchor: sink-place
    if w.has("wren-sink-block"):
        key_place = plan.keys % len(plan.place)  # plant: wren-sink-block
    sink = (key_place[:, None] - plan.first[plan.keys] < c.sinks).t()
    return seen & ((behind < c.window) | sink[:, None, :])
