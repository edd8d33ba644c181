"""The synthetic batch: equal tokens for every caller, and shares that together are the global batch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from moeverify.cases.axes.split import split_rows
from moeverify.cases.schema import ContextParallel, Data
from moeverify.parallel.context_parallel import split_positions
from moeverify.train.data import IGNORED, MicroBatch, Share, make_batch, whole_share

DATA = Data(batch=8, seq_len=16, min_valid=0.4)
CPU = torch.device("cpu")


def make(share: Share, *, data: Data = DATA, seed: int = 0, step: int = 0) -> MicroBatch:
    return make_batch(data, 97, seed, step, share, CPU)


@pytest.mark.parametrize("kind", get_args(ContextParallel))
def test_shares_are_parts_of_the_global_batch(kind: str) -> None:
    whole = make(whole_share(DATA))
    tokens, targets = torch.full((8, 16), -1), torch.full((8, 16), -1)
    for data_rank in range(2):
        for cp_rank in range(2):
            positions = split_positions(16, 2, cp_rank, kind)  # type: ignore[arg-type]
            share = Share(split_rows(8, 2, data_rank), positions)
            part = make(share)
            region = share.region(DATA)
            region.put(tokens, part.tokens)
            region.put(targets, part.targets)
            assert torch.equal(part.valid, region.take(whole.valid))
            assert torch.equal(part.positions, region.take(whole.positions))
            assert torch.equal(part.row_valid, whole.row_valid[list(share.rows)])
    assert torch.equal(tokens, whole.tokens)
    assert torch.equal(targets, whole.targets)


def test_targets_are_the_next_tokens_where_they_count() -> None:
    batch = make(whole_share(DATA))
    assert torch.equal(batch.targets[:, :-1][batch.valid[:, :-1]], batch.tokens[:, 1:][batch.valid[:, :-1]])
    assert torch.equal(batch.targets == IGNORED, ~batch.valid)
    assert int(batch.tokens.min()) >= 0
    assert int(batch.tokens.max()) < 97


def test_rows_end_in_padding_of_different_lengths() -> None:
    batch = make(
        whole_share(Data(batch=64, seq_len=16, min_valid=0.4)), data=Data(batch=64, seq_len=16, min_valid=0.4)
    )
    assert torch.equal(batch.valid.sum(dim=1), batch.row_valid)
    assert set(batch.row_valid.tolist()) == set(range(7, 17))  # from ceil(0.4 * 16) on
    assert torch.equal(batch.valid, batch.positions < batch.row_valid[:, None])


def test_without_padding_everything_counts() -> None:
    data = Data(batch=4, seq_len=8)
    assert bool(make(whole_share(data), data=data).valid.all())
    nothing = Data(batch=64, seq_len=8, min_valid=0.0)
    assert int(make(whole_share(nothing), data=nothing).row_valid.min()) == 1  # never a row without a loss


def test_every_step_row_and_seed_has_its_own_tokens() -> None:
    first = make(whole_share(DATA))
    assert torch.equal(first.tokens, make(whole_share(DATA)).tokens)
    assert not torch.equal(first.tokens, make(whole_share(DATA), step=1).tokens)
    assert not torch.equal(first.row_valid, make(whole_share(DATA), step=1).row_valid)
    assert not torch.equal(first.tokens, make(whole_share(DATA), seed=1).tokens)
    assert len({tuple(row) for row in first.tokens.tolist()}) == 8


def test_micro_batches_are_the_rows_in_order() -> None:
    share = Share((5, 1, 2, 7), range(16))
    parts = share.micro_batches(2)
    assert [part.rows for part in parts] == [(5, 1), (2, 7)]
    assert [part.rows for part in Share(range(4, 8), range(16)).micro_batches(2)] == [
        range(4, 6),
        range(6, 8),
    ]
    assert torch.equal(torch.cat([make(part).tokens for part in parts]), make(share).tokens)


def test_tensors_are_contiguous() -> None:
    batch = make(Share(range(2), (0, 1, 14, 15)))
    assert batch.tokens.is_contiguous()
    assert batch.targets.is_contiguous()
    assert batch.positions.is_contiguous()
