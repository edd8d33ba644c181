"""The records of a guarded loop in this process: collectives from step to step, rows and lines of every step."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from moeverify.parallel.regions.local_shard import parameters
from moeverify.scripts.guard.exchange import Inbox
from moeverify.scripts.guard.guard import Guard
from moeverify.scripts.guard.lines import RankHeader, StepRecord
from moeverify.scripts.guard.samples import count_positions
from moeverify.scripts.guard.sampling import describe_tensors
from moeverify.scripts.guard.settings import GuardSettings
from moeverify.train.calls.hooks import install

NUM_STEPS = 4


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Sum(nn.Module):
    """A module that adds its input up over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(x.detach().clone())
        return x * self.weight


def train(out: Path, *, steps_in_backward: bool = False) -> tuple[RankHeader, list[StepRecord]]:
    guard = Guard(GuardSettings(out=out), 0, 2)
    hooks = install(guard)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8), Sum())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if steps_in_backward:
            model[1].weight.register_post_accumulate_grad_hook(lambda weight: optimizer.step())
        for _ in range(NUM_STEPS):
            dist.broadcast(torch.zeros(100), 0)  # before the forward pass, as a pipeline stage receives
            # A thread, such as that of an asynchronous checkpoint, has no order relative to the steps.
            thread = threading.Thread(target=dist.all_reduce, args=(torch.zeros(100),))
            thread.start()
            thread.join()
            batch = torch.randint(16, (2, 9))
            model(batch[:, :-1]).sum().backward()
            if not steps_in_backward:
                optimizer.step()
            optimizer.zero_grad()
        guard.close()
    finally:
        hooks.remove()
    inbox = Inbox(out)
    records = [taken[0] for taken in inbox.take(is_over=True)]
    return inbox.headers[0], records


@pytest.mark.usefixtures("group")
def test_a_step_has_the_collectives_and_rows_since_the_step_before(tmp_path: Path) -> None:
    random.seed(1)
    header, records = train(tmp_path)
    assert [[group.number for group in record.groups] for record in records] == [[2]] * NUM_STEPS
    assert [[group.num_before for group in record.groups] for record in records] == [[2]] * NUM_STEPS
    assert [len(record.rows) for record in records] == [1] * NUM_STEPS
    passes = [each for record in records for each in record.passes]
    assert [each.number for each in passes] == list(range(NUM_STEPS))
    torch_states, python_states = ({each.states[place] for each in passes} for place in (0, 1))
    assert (len(torch_states), len(python_states)) == (NUM_STEPS, 1)
    # Only the reduction within the model exchanges activations.
    assert [record.exchanged for record in records] == [((0, 1),)] * NUM_STEPS
    assert [len(record.sums) for record in records] == [1] * NUM_STEPS
    assert all(line.hash for record in records for line in record.sums)
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    draw = next(number for number, line in lines if "batch = torch.randint" in line)
    assert {record.data_site for record in records} == {f"test_guard_steps.py:{draw}"}
    # nn.Sequential, of torch, calls the modules; the line is the script's.
    assert {tensor.site for tensor in header.tensors} == {f"test_guard_steps.py:{draw + 1}"}
    assert [tensor.is_varied for tensor in header.tensors] == [True, False]
    # 2 rows of 8 tokens.
    assert [header.num_positions, *(tensor.num_positions for tensor in header.tensors)] == [16] * 3


def test_a_vector_for_each_channel_is_not_applied_along_the_last_dim() -> None:
    convolution = nn.Conv2d(1, 4, 1)
    shards, (_, bias) = parameters(convolution), convolution.parameters()
    positions = {id(bias): count_positions(torch.ones(2, 4, 3, 6))}
    assert positions[id(bias)] == (24, 6)
    assert [line.num_positions for line in describe_tensors(shards, {}, positions)] == [0, 0]


@pytest.mark.usefixtures("group")
def test_an_optimizer_that_steps_within_a_backward_pass_cuts_collectives_apart(tmp_path: Path) -> None:
    _, records = train(tmp_path, steps_in_backward=True)
    assert not any(record.is_traced for record in records)
