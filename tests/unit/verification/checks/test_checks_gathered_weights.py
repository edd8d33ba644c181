"""Gathered weights against stored ones, on one rank, where FSDP still gathers into separate tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from moeverify.parallel.regions.region import Region
from moeverify.report.words.run import word_finding
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import ShownTensors
from moeverify.verification.checks.gathered_weights import (
    MOST_ELEMENTS,
    GatheredReport,
    GatheredWatch,
    GatheredWeights,
    StaleParameter,
    _locate,
)

NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.linear(x)
        return added


class Tied(nn.Module):
    """An embedding that is also the head, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(48, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = 2 * self.head(x)
        return logits


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(mesh: DeviceMesh, policy: MixedPrecisionPolicy = NARROW) -> Tied:
    torch.manual_seed(0)
    model = Tied()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(
    model: nn.Module, num_steps: int, between: Callable[[int], None] = lambda step: None
) -> GatheredWatch:
    """Return a watch of this many steps of two micro-batches."""
    watch = GatheredWatch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        watch.begin_step(step)
        between(step)
        for micro_batch in range(2):
            model(torch.arange(8).view(2, 4) + micro_batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    return watch


def list_differences(watch: GatheredWatch) -> list[StaleParameter]:
    return sorted(watch.report().differences, key=lambda each: each.parameter)


BLOCK = ["blocks.1.linear.bias", "blocks.1.linear.weight"]
ALL = ["blocks.0.linear.bias", "blocks.0.linear.weight", *BLOCK, "embed.weight"]


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), NARROW])
def test_what_is_gathered_anew_in_each_pass_is_what_is_stored(
    mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    report = train(shard(mesh, policy), 3).report()
    assert report.names == tuple(ALL)
    assert report.differences == ()


def test_weights_that_stay_gathered_over_a_step_are_stale(mesh: DeviceMesh) -> None:
    model = shard(mesh)
    block = model.blocks[1]
    assert isinstance(block, FSDPModule)
    block.set_reshard_after_forward(False)
    block.set_reshard_after_backward(False)
    found = list_differences(train(model, 3))
    assert [(each.parameter, each.step, each.is_stale, each.dtype) for each in found] == [
        (name, 1, True, "bfloat16") for name in BLOCK
    ]


def test_a_gathered_weight_that_was_written_into_is_wrong_and_not_stale(mesh: DeviceMesh) -> None:
    # Another tensor's values, as in a buffer that is reused too early; only in the second micro-batch.
    model = shard(mesh)
    passes = []

    def spoil(module: nn.Module, inputs: object) -> None:
        passes.append(module)
        if len(passes) == 4:
            module.weight.data[3].copy_(module.weight.data[5])

    model.blocks[0].linear.register_forward_pre_hook(spoil)
    (found,) = list_differences(train(model, 3))
    assert (found.parameter, found.step, found.is_stale) == ("blocks.0.linear.weight", 1, False)
    assert found.index[0] == 3
    assert 0 < found.num_wrong <= 48
    assert found.used != found.stored


def test_weights_that_are_exchanged_where_they_are_stored_are_no_error(mesh: DeviceMesh) -> None:
    # An average of the weights (EMA) replaces them in the middle of a step, and is gathered from then on.
    model = shard(mesh)

    def average(step: int) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)

    assert list_differences(train(model, 3, average)) == []


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:.*FSDP1:FutureWarning")
def test_flat_parameters_that_fsdp1_does_not_cut_are_as_stored(mesh: DeviceMesh) -> None:
    model = FullyShardedDataParallel(Tied(), use_orig_params=True, device_id=torch.device("cpu"))
    assert list_differences(train(model, 2)) == []


def test_a_model_whose_weights_are_used_as_stored_has_nothing_gathered(mesh: DeviceMesh) -> None:
    assert train(Tied(), 2).report().names == ()


def test_elements_are_found_in_rows_that_a_rank_has_out_of_order() -> None:
    # FSDP2's shard of a tensor (8, 4) that tp has cut: the last two of the rows 0, 2, 4, 6.
    used = Region.box((8, 4), [(0, 2, 4, 6), range(4)])
    stored = (torch.tensor([4, 6]), torch.tensor([1, 3]))
    found = _locate(stored, used)
    assert found is not None
    assert [each.tolist() for each in found] == [[2, 3], [1, 3]]
    assert _locate((torch.tensor([5]), torch.tensor([0])), used) is None


def test_a_large_shard_is_sampled(mesh: DeviceMesh) -> None:
    model = shard(mesh)
    weights = {each.name: each for each in GatheredWatch(model)._weights.values()}
    assert 0 < len(weights["embed.weight"].stored_at.coordinates[0]) <= MOST_ELEMENTS
    assert len(set(weights["embed.weight"].stored_at.coordinates[1].tolist())) > 1


Judge = Callable[[Sequence[GatheredReport]], tuple[Finding, ...]]


@pytest.fixture
def shown(run_ranks: Callable) -> ShownTensors:
    shown: ShownTensors = run_ranks({rank: {"dp_shard": rank} for rank in range(3)}).shown()
    return shown


@pytest.fixture
def judge(shown: ShownTensors) -> Judge:
    """Return a function that returns the findings as text."""

    def do(by_rank: Sequence[GatheredReport]) -> tuple[Finding, ...]:
        outcome = GatheredWeights().judge(shown, by_rank)
        assert outcome is not None
        return tuple(map(word_finding, outcome.findings))

    return do


def report(names: list[str], *, is_stale: bool = False) -> GatheredReport:
    wrong = tuple(
        StaleParameter(1, name, "bfloat16", 5, 8, (3, 0), 0.5, 0.25, is_stale=is_stale) for name in names
    )
    return GatheredReport(tuple(ALL), wrong)


def test_all_of_a_module_is_one_finding_with_the_ranks_on_which_it_is(judge: Judge) -> None:
    (finding,) = judge([report([]), report(BLOCK, is_stale=True), report(BLOCK, is_stale=True)])
    assert (finding.tensor, finding.step, finding.ranks, finding.code) == ("blocks.1", 1, (1, 2), Cause.STALE)
    assert finding.place is not None
    assert finding.place.module == "blocks.1"
    assert finding.cause == "blocks.1 computes with the weights of the step before: they were not refreshed"
    assert finding.evidence[0] == "2 of 5 gathered parameters"


def test_a_parameter_that_a_step_left_as_it_was_is_no_sound_part_of_its_module(judge: Judge) -> None:
    stale = report(BLOCK[1:], is_stale=True)
    assert [finding.tensor for finding in judge([stale])] == ["blocks.1.linear.weight"]
    block = replace(stale, names=(*ALL, "blocks.1.norm.weight"))
    assert [finding.tensor for finding in judge([block])] == ["blocks.1.linear.weight"]
    left = replace(block, unmoved=frozenset({"blocks.1.norm.weight", BLOCK[0]}))
    assert [finding.tensor for finding in judge([left])] == ["blocks.1"]


def test_parameters_that_do_not_move_are_reported_beside_those_that_are_stale(mesh: DeviceMesh) -> None:
    model = shard(mesh)
    block = model.blocks[1]
    assert isinstance(block, FSDPModule)
    block.set_reshard_after_forward(False)
    block.set_reshard_after_backward(False)
    block.linear.bias.requires_grad_(False)
    found = train(model, 2).report()
    assert [each.parameter for each in found.differences] == BLOCK[1:]
    assert BLOCK[0] in found.unmoved


def test_other_values_than_the_stored_ones_have_no_cause_by_themselves(judge: Judge) -> None:
    (finding,) = judge([report(["embed.weight"])])
    assert (finding.tensor, finding.code) == ("embed", "")
    assert finding.evidence[-1] == "5 of 8 compared elements of embed.weight in bfloat16"


def test_where_nothing_is_gathered_there_is_no_verdict(shown: ShownTensors) -> None:
    assert GatheredWeights().judge(shown, [GatheredReport((), ())]) is None


def test_a_clean_run_passes_with_the_number_of_parameters(shown: ShownTensors) -> None:
    outcome = GatheredWeights().judge(shown, [report([]), report([])])
    assert outcome is not None
    assert (outcome.result.verdict, outcome.result.tensors) == ("pass", 5)


def exchange(used: str, stored: str) -> GatheredReport:
    found = tuple(
        StaleParameter(1, name, "float32", 8, 8, (3, 0), 0.5, 0.25, is_stale=False, used=used, stored=stored)
        for name in BLOCK
    )
    return GatheredReport(tuple(ALL), found)


def test_parts_that_other_ranks_store_are_in_the_places_of_those(judge: Judge) -> None:
    (finding,) = judge([exchange("b", "a"), exchange("c", "b"), exchange("a", "c")])
    assert finding.code == Cause.PERMUTATION
    assert finding.facts.sources == ((0, 1), (1, 2), (2, 0))
    assert finding.cause.startswith("blocks.1 computes with misplaced parts of weights: rank ")


def test_values_that_no_rank_stores_have_no_source(judge: Judge) -> None:
    for reports in ([exchange("b", "a"), exchange("x", "b")], [exchange("x", "a"), exchange("x", "b")]):
        (finding,) = judge(reports)
        assert (finding.code, finding.facts.sources) == ("", ())
