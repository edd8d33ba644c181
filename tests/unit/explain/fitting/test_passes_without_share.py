"""Passes of a module outside the micro-batches, such as validation, have no place in the batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from moeverify.explain.fitting.rank_readings import AllReadings, RankReadings
from moeverify.train.module_taps import FORWARD, Reading

READING = Reading(FORWARD, 0, "norm", "output", 0, torch.ones(2, 3, 4, dtype=torch.float64))
WHOLE = [(range(2), range(3))]


def test_a_pass_more_than_there_are_micro_batches_is_left_out() -> None:
    more = replace(READING, micro_batch=1, local=2 * READING.local)
    ranks = [RankReadings([READING, more], [(range(2), range(3))])]
    found = AllReadings(ranks, {0: {}}, 1, torch.float64).gather(READING)
    assert found is not None
    tensor, _, _ = found
    assert not tensor.differs()


def test_what_a_rank_read_in_passes_of_no_known_micro_batch_is_left_out() -> None:
    for ranks in ([RankReadings([READING], [])], [RankReadings([READING], []), RankReadings([], WHOLE)]):
        assert (
            AllReadings(ranks, {rank: {} for rank in range(len(ranks))}, 1, torch.float64).gather(READING)
            is None
        )
