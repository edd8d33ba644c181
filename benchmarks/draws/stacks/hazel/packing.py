"""Packed rows: where documents begin, and which keys a query sees."""

from dataclasses import dataclass

import torch

from hazel.comm import gather


@dataclass
class Packed:
    place: torch.Tensor  # (own,): index in the row
    pos: torch.Tensor  # (rows, own): index in the document
    doc: torch.Tensor  # (rows, own)
    key_place: torch.Tensor  # as above, of the keys that this rank holds or gathers
    key_doc: torch.Tensor


def cu_seqlens(tokens, first_word):
    """Return the cumulative lengths of the documents in the flattened rows. Rows begin documents."""
    begins = tokens < first_word
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([tokens.numel()])])


def read_packed(tokens, first_word, pc):
    """Return the positions of a rank's tokens, by the documents of whole rows."""
    rows, length = tokens.shape
    ranks = pc.size("cp")
    places = torch.cat([pc.places(length, rank) for rank in range(ranks)])
    whole = gather(tokens, pc.group("cp"), 1)[:, places.argsort()]
    cu = cu_seqlens(whole, first_word)
    index = torch.arange(whole.numel())
    doc = torch.searchsorted(cu, index, right=True) - 1
    pos = (index - cu[doc]).view(rows, -1)
    doc = doc.view(rows, -1)
    own = pc.places(length)
    if ranks == 1 or pc.ring:
        return Packed(own, pos[:, own], doc[:, own], own, doc[:, own])
    if pc.on("hazel-key-order"):
        places = torch.arange(ranks * length)  # plant: hazel-key-order
    return Packed(own, pos[:, own], doc[:, own], places, doc[:, places])  # anchor: key-places


def visible(place, doc, key_place, key_doc, window):
    """Return (rows, queries, keys): the same document, not later, and less than a window before."""
    gap = place[:, None] - key_place
    return (gap >= 0) & (gap < window) & (doc[:, :, None] == key_doc[:, None, :])


def visible_from_starts(packed, window):
    """The same by the first key of each query: the start of its document, or of its window."""
    first = torch.maximum(packed.place - packed.pos, packed.place - (window - 1))
    keys = packed.key_place[None, None]
    return (keys >= first[..., None]) & (keys <= packed.place[:, None])


class Masks:
    """The masks of one forward pass, by window."""

    def __init__(self, packed, pc):
        self.packed, self.pc, self.made = packed, pc, {}

    def __getitem__(self, window):
        p = self.packed
        key = len(p.place) if self.pc.on("hazel-mask-key") else window  # plant: hazel-mask-key
        if key not in self.made:
            if self.pc.on("hazel-same-starts"):
                self.made[key] = visible_from_starts(p, window)
            else:
                self.made[key] = visible(p.place, p.doc, p.key_place, p.key_doc, window)
        return self.made[key]
