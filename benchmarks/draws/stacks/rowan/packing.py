"""Documents in packed rows, as cumulative lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rowan.registry import op, pick
from rowan.topology import here
from rowan.wire import concat_ranks


class Packed(NamedTuple):
    doc: Tensor  # (rows, own positions): the document of a token
    pos: Tensor  # (rows, own positions): its position in the document
    place: Tensor  # (own positions): its position in the row
    key_doc: Tensor  # (rows, positions of the row)
    key_pos: Tensor
    before: Tensor  # (rows): the document of the token before this rank's first one, or -1


def cumulative_lengths(tokens: Tensor, first_word: int) -> Tensor:
    """Return where documents begin in the flattened rows, and the number of tokens. Rows begin documents."""
    begins = tokens < first_word
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=tokens.numel())


@op("whole_rows")
def whole_rows(tokens: Tensor) -> Tensor:
    group = here().group("cp")
    return tokens if group is None else concat_ranks(tokens, group, 1)  # anchor: whole-rows


@op("whole_rows", "rowan-gather-view")
def viewed_rows(tokens: Tensor) -> Tensor:
    parts = concat_ranks(tokens, here().group("cp"), 0)
    return parts.view(tokens.shape[0], -1)  # plant: rowan-gather-view


def pack(tokens: Tensor, first_word: int) -> Packed:
    topology = here()
    rows, length = tokens.shape
    whole = pick("whole_rows")(tokens)
    cu = cumulative_lengths(whole, first_word)
    flat = torch.arange(whole.numel(), device=tokens.device)
    doc = torch.bucketize(flat, cu[1:], right=not topology.odd("rowan-doc-left"))  # plant: rowan-doc-left
    pos = flat - cu[doc]
    doc, pos = doc.view(rows, -1), pos.view(rows, -1)
    first = topology.rank("cp") * length
    before = F.pad(doc, (1, 0), value=-1)[:, first]  # anchor: before
    place = torch.arange(first, first + length, device=tokens.device)
    own = slice(first, first + length)
    if topology.odd("rowan-before-own"):
        before = doc[:, first]  # plant: rowan-before-own
    return Packed(doc[:, own], pos[:, own], place, doc, pos, before)
