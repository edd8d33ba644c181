"""Documents in packed rows, from the tokens of one rank and a few numbers of the others."""

from dataclasses import dataclass

import torch

from sorrel.comms import gather_plain


@dataclass
class Segments:
    ends: torch.Tensor  # (rows, own): the token is the last one of its document
    pos: torch.Tensor  # (rows, own): index within the document
    docs: torch.Tensor  # (rows, all): number of the document in its row


def read_segments(tokens, config, grid):
    ends = tokens < config.num_ends
    if grid.has("sorrel-same-whole"):
        whole = gather_plain(tokens, grid.group("cp"), 1) < config.num_ends
        pos, docs = count_within(whole)
        own = slice(grid.rank("cp") * tokens.shape[1], (grid.rank("cp") + 1) * tokens.shape[1])
        return Segments(ends, pos[:, own], docs)
    pos, docs = count_within(ends)
    if grid.size("cp") > 1:
        before, open_length = read_borders(ends, grid)
        if not grid.has("sorrel-pos-restart"):  # plant: sorrel-pos-restart
            pos = torch.where(docs == 0, pos + open_length[:, None], pos)  # anchor: carried-pos
        docs = gather_plain(docs + before[:, None], grid.group("cp"), 1)
    return Segments(ends, pos, docs)


def count_within(ends):
    """Return positions within documents, and numbers of documents, as if rows began here."""
    index = torch.arange(ends.shape[1]).expand_as(ends)
    docs = ends.long().cumsum(1) - ends.long()
    begins = torch.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    start = (index * begins).cummax(1).values
    return index - start, docs


def read_borders(ends, grid):
    """Return how many documents end on earlier ranks, and how much of the open one they have."""
    length = ends.shape[1]
    index = torch.arange(1, length + 1)
    last = (ends * index).amax(1)
    sent = torch.stack([ends.sum(1), length - last])
    everyone = gather_plain(sent[None], grid.group("cp"), 0)
    before = torch.zeros_like(last)
    open_length = torch.zeros_like(last)
    ranks = grid.rank("cp")  # anchor: ranks-before
    if grid.has("sorrel-docs-inclusive"):
        ranks = grid.rank("cp") + 1  # plant: sorrel-docs-inclusive
    for count, _ in everyone[:ranks]:
        before = before + count
    for count, tail in everyone[: grid.rank("cp")]:
        if grid.has("sorrel-open-long"):
            open_length = tail  # plant: sorrel-open-long
        else:
            open_length = torch.where(count > 0, tail, open_length + length)  # anchor: open-length
    return before, open_length


def next_of(x, fill, grid):
    """Return what stands one place to the right, in the rows of all ranks."""
    out = torch.full_like(x, fill)
    out[:, :-1] = x[:, 1:]
    if grid.size("cp") > 1 and not grid.has("sorrel-next-border"):  # plant: sorrel-next-border
        firsts = gather_plain(x[:, :1], grid.group("cp"), 1)
        right = grid.rank("cp") + 1  # anchor: right
        if grid.has("sorrel-next-left"):
            right = (grid.rank("cp") - 1) % grid.size("cp")  # plant: sorrel-next-left
        if right < grid.size("cp"):
            out[:, -1] = firsts[:, right]
    return out
