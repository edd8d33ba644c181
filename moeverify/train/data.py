"""The synthetic global batch and the share of it that a rank sees.

Tokens are a function of seed, step, row and position. Every rank computes its own share, and the global
batch is the same under every layout. Rows end in padding of different lengths.

Shapes: B rows, S positions of the global batch; b, s of a rank's share; M rows of one micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.cases.schema import Data
from moeverify.hashing import hash_counter, key_of
from moeverify.parallel.regions.region import Indices, Region, as_indices

IGNORED = -100  # target of a token without loss: the default ignore_index of torch's cross entropy


@dataclass(frozen=True)
class Share:
    """The rows and positions of the global batch that a rank sees, in the rank's order."""

    rows: Indices
    positions: Indices

    def region(self, data: Data, *trailing: int) -> Region:
        """Return the region of a logical tensor of shape (B, S, *trailing) that this share covers."""
        shape = (data.batch, data.seq_len, *trailing)
        return Region.box(shape, (self.rows, self.positions, *(range(size) for size in trailing)))

    def micro_batches(self, num: int) -> list[Share]:
        """Return the share split into `num` micro-batches with equal numbers of rows."""
        size = len(self.rows) // num
        return [
            Share(as_indices(self.rows[start : start + size]), self.positions)
            for start in range(0, size * num, size)
        ]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: tokens, targets, positions (M, s) int64; valid (M, s) bool; row_valid (M) int64."""

    share: Share
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    valid: Tensor
    row_valid: Tensor


def whole_share(data: Data) -> Share:
    """Return the share of a single device: all rows and positions."""
    return Share(range(data.batch), range(data.seq_len))


def make_batch(
    data: Data, vocab_size: int, seed: int, step: int, share: Share, device: torch.device
) -> MicroBatch:
    """Return this share of the global batch at a step, on `device`.

    `row_valid` counts the valid tokens of each row over all positions, including those that other ranks
    see.
    """
    # Creating a GPU tensor from host numbers directly would synchronize with all work launched before it.
    rows = torch.tensor(tuple(share.rows)).to(device, non_blocking=True)
    positions = torch.tensor(tuple(share.positions)).to(device, non_blocking=True)
    length = data.seq_len + 1  # the last token is used only as a target
    stream = torch.arange(length, device=device)
    counter = rows[:, None] * length + stream[None, :]
    text = torch.remainder(hash_counter(key_of(seed, "tokens", step), counter), vocab_size)
    row_valid = _valid_lengths(data, seed, step, rows)
    valid = positions[None, :] < row_valid[:, None]
    targets = text[:, 1:][:, positions].masked_fill(~valid, IGNORED)
    return MicroBatch(
        share,
        text[:, :-1][:, positions].contiguous(),
        targets.contiguous(),
        positions[None, :].expand(len(rows), -1).contiguous(),
        valid,
        row_valid,
    )


def _valid_lengths(data: Data, seed: int, step: int, rows: Tensor) -> Tensor:
    """Return the number of valid leading tokens of each row, between ceil(min_valid * S) and S."""
    shortest = max(1, math.ceil(data.min_valid * data.seq_len))
    choices = data.seq_len - shortest + 1
    drawn = torch.remainder(hash_counter(key_of(seed, "lengths", step), rows), choices)
    return shortest + drawn
