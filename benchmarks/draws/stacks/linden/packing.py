"""Where the tokens of packed rows stand."""

from dataclasses import dataclass

import torch

from linden.coll import gather


@dataclass
class Where:
    """Place in the row, document and position in it. Those of keys are lists by rank of `cp`."""

    place: torch.Tensor  # (rows, positions of this rank), as the next two
    doc: torch.Tensor
    pos: torch.Tensor
    key_place: list
    key_doc: list


def locate(tokens, sizes, topo):
    """Find the documents of whole rows, of which a rank of `cp` has a run of positions."""
    cp, length = topo.cp, tokens.shape[1]
    parts = gather(tokens, cp)
    whole = torch.cat(parts, 1)  # anchor: whole-rows
    if topo.on("linden-rows-woven"):
        whole = torch.stack(parts, -1).flatten(1)  # plant: linden-rows-woven
    begins = whole < sizes.specials
    place = torch.arange(whole.shape[1]).expand_as(whole)
    doc = begins.cumsum(1)
    start = torch.where(begins, place, 0).cummax(1).values
    pos = place - start
    own = slice(cp.rank * length, (cp.rank + 1) * length)
    own_place = place[:, own]  # anchor: own-place
    if topo.on("linden-place-local"):
        own_place = place[:, :length]  # plant: linden-place-local
    return Where(own_place, doc[:, own], pos[:, own], place.split(length, 1), doc.split(length, 1))


def visible(where, source, window, sizes, topo):
    """Return (rows, queries, keys) for keys of a rank: the same document, not later, not too far away."""
    behind = where.place[:, :, None] - where.key_place[source][:, None, :]
    same = where.doc[:, :, None] == where.key_doc[source][:, None, :]
    if topo.on("linden-docs-own") and source != topo.cp.rank:
        same = torch.ones_like(same)  # plant: linden-docs-own
    seen = same & (behind >= 0)
    if window:
        near = behind < window  # anchor: near
        if topo.on("linden-window-edge"):
            near = behind <= window  # plant: linden-window-edge
        seen = seen & near
    return seen
