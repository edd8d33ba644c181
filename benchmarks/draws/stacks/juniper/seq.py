"""Documents of packed rows: which document and which position in it each token has."""

from dataclasses import dataclass

import torch

from juniper.collectives import gather_parts


@dataclass
class Seq:
    index: torch.Tensor  # places in the row of this rank's tokens
    pos: torch.Tensor  # (rows, tokens of this rank): positions in their documents
    doc: torch.Tensor  # (rows, tokens of this rank)
    row_doc: torch.Tensor  # (rows, all tokens)


def in_order(parts, grid):
    """Join (ranks, rows, positions, ...) along positions in the order of the row."""
    if not grid.zigzag:
        return torch.cat(parts.unbind(0), 1)
    front, back = zip(*(part.chunk(2, 1) for part in parts.unbind(0)))
    return torch.cat([*front, *reversed(back)], 1)


def own_places(length, grid):
    """Return places in the row of `length` tokens of this rank."""
    cp = grid.cp
    if not grid.zigzag:
        return torch.arange(length) + cp.rank * length
    half = length // 2
    late = 2 * cp.size - 1 - cp.rank  # anchor: late
    if grid.mode == "ju05":
        late = cp.size + cp.rank  # plant: ju05
    return torch.cat([torch.arange(half) + cp.rank * half, torch.arange(half) + late * half])


def whole_row(x, grid):
    """Return all tokens of the rows of which this rank has a part."""
    return in_order(gather_parts(x, grid.cp), grid) if grid.cp.size > 1 else x


def read(tokens, c, grid):
    row = whole_row(tokens, grid)
    ends = (row < c.enders).long()
    doc = ends.cumsum(1) - ends  # anchor: doc
    if grid.mode == "ju06":
        doc = ends.cumsum(1)  # plant: ju06
    place = torch.arange(row.shape[1]).expand_as(row)
    first = torch.cat([torch.ones_like(ends[:, :1]), ends[:, :-1]], 1).bool()
    pos = place - torch.where(first, place, 0).cummax(1).values
    index = own_places(tokens.shape[1], grid)
    return Seq(index, pos[:, index], doc[:, index], doc)


def one_later(targets, grid):
    """Return the target of the next position of the row, and -100 at its end."""
    row = whole_row(targets, grid)
    later = torch.cat([row[:, 1:], torch.full_like(row[:, :1], -100)], 1)
    if grid.mode == "ju07":
        return torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], -100)], 1)  # plant: ju07
    return later[:, own_places(targets.shape[1], grid)]  # anchor: later
