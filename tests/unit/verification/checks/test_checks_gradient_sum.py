"""Gradients against sums of the layers' values on all ranks: right ones agree, wrong ones are classified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeverify.cases.schema import Case
from moeverify.faults.setting import make_case
from moeverify.model.norm import LayerNorm, RMSNorm
from moeverify.parallel.regions.region import Region
from moeverify.report.words.run import word_finding
from moeverify.results.cause import Cause
from moeverify.results.facts import GradientSumFacts
from moeverify.verification.checks.base import CheckOutcome
from moeverify.verification.checks.gradient_sum import GradientSum, GradientSumWatch, Reports, judge_sums
from moeverify.verification.checks.layer_gradients import Sample

NUM_RANKS = 2
Change = Callable[[str, list[Tensor]], Tensor]
Judge = Callable[..., CheckOutcome]
ASKED = {"also": ("gradient sum",)}


class Layers(nn.Module):
    """A matrix larger than the checked part, a layer with one output, both norms, and two uses."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide = nn.Linear(100, 130, dtype=dtype)
        self.again = nn.Linear(130, 130, bias=False, dtype=dtype)
        self.first = RMSNorm(130, 1e-6, {"dtype": dtype})
        self.second = LayerNorm(130, 1e-6, {"dtype": dtype})
        self.gate = nn.Linear(130, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., 1); `again` is called twice."""
        hidden = self.again(self.first(self.again(self.wide(x))) + 3.0)
        output: Tensor = self.gate(self.second(hidden))
        return output


def average(name: str, of_ranks: list[Tensor]) -> Tensor:
    """Return the data-parallel average of the gradients of all ranks."""
    return torch.stack(of_ranks).mean(dim=0)


def train(dtype: torch.dtype, change: Change = average, micro_batches: int = 1) -> list[Reports]:
    """Return two ranks' reports of a step, each with its half of the gradients that `change` returns."""
    torch.manual_seed(0)
    model = Layers(dtype)
    watches, gradients = [], []
    for _ in range(NUM_RANKS):
        watch = GradientSumWatch(model, "none")
        watch.begin_step(0)
        model.zero_grad()
        for _ in range(micro_batches):
            outputs = model(torch.randn(3, 40, 100).to(dtype))
            outputs.backward(torch.randn_like(outputs))
        watch.close()
        watches.append(watch)
        gradients.append(
            {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        )
    for name in gradients[0]:
        whole = change(name, [each[name] for each in gradients])
        for rank, watch in enumerate(watches):
            region = halve(whole.shape, rank)
            local = whole if whole.dim() == len(region.shape) else whole[rank]  # each rank's own, stacked
            watch.observe(0, "gradient", name, region.take(local), region)
    return [watch.report() for watch in watches]


def halve(shape: torch.Size, rank: int) -> Region:
    """Return the rows of a rank."""
    shape = shape[-2:] if len(shape) == 3 else shape
    middle = -(-shape[0] // 2)
    rows = range(middle) if rank == 0 else range(middle, shape[0])
    return Region.box(shape, [rows, *(range(size) for size in shape[1:])])


@pytest.fixture
def judge(run_ranks: Callable) -> Judge:
    """Return a function that judges the reports of two ranks."""

    def do(reports: list[Reports]) -> CheckOutcome:
        return judge_sums(run_ranks({0: {}, 1: {}}).shown(make_case("x", dp_shard=2)), reports)

    return do


def facts_of(outcome: CheckOutcome) -> dict[str, GradientSumFacts]:
    """Return the findings, by tensor."""
    found = {each.tensor: each.facts for each in outcome.findings}
    assert all(isinstance(each, GradientSumFacts) for each in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("dtype", "micro_batches"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 3)]
)
def test_sums_are_right_in_every_dtype_and_sharply_so(
    judge: Judge, dtype: torch.dtype, micro_batches: int
) -> None:
    outcome = judge(train(dtype, micro_batches=micro_batches))
    assert outcome.findings == ()
    assert {name for _, _, name in outcome.limits} == {name for name, _ in Layers(dtype).named_parameters()}
    assert max(outcome.limits.values()) < (2e-3 if dtype == torch.float32 else 0.2)


def scaled(name: str, of_ranks: list[Tensor], *, of: str, factors: tuple[float, ...]) -> Tensor:
    """Return the mean, with one tensor scaled by a factor per rank."""
    if name != of:
        return average(name, of_ranks)
    return average(name, [factor * each for factor, each in zip(factors, of_ranks, strict=True)])


@pytest.mark.parametrize("name", ["wide.weight", "wide.bias", "again.weight", "first.weight", "gate.weight"])
def test_a_rank_that_is_left_out_is_named(judge: Judge, name: str) -> None:
    outcome = judge(train(torch.bfloat16, partial(scaled, of=name, factors=(1.0, 0.0))))
    assert {each: facts.left_out for each, facts in facts_of(outcome).items()} == {name: (1,)}
    assert outcome.findings[0].code == Cause.SHARE_WEIGHTS
    assert "lacks the contribution of rank 1" in word_finding(outcome.findings[0]).cause


def test_a_factor_of_all_ranks_is_named(judge: Judge) -> None:
    outcome = judge(train(torch.bfloat16, partial(scaled, of="second.weight", factors=(0.5, 0.5))))
    (facts,) = facts_of(outcome).values()
    assert facts.factor == pytest.approx(0.5, rel=0.01)
    assert outcome.findings[0].code == Cause.SCALE


def test_a_rank_that_counts_less_than_noise_would_show_is_named(judge: Judge) -> None:
    outcome = judge(train(torch.bfloat16, partial(scaled, of="gate.weight", factors=(1.0, 0.7))))
    (facts,) = facts_of(outcome).values()
    assert list(facts.factors.values()) == pytest.approx([1.0, 0.7], abs=0.02)
    assert (facts.factor, facts.left_out) == (None, ())


@pytest.mark.parametrize("factor", [1.0, 1.0 / NUM_RANKS])
def test_parts_that_no_collective_has_summed_are_named(judge: Judge, factor: float) -> None:
    def keep_own(name: str, of_ranks: list[Tensor]) -> Tensor:
        return factor * torch.stack(of_ranks) if name == "again.weight" else average(name, of_ranks)

    outcome = judge(train(torch.float32, keep_own))
    assert {name: facts.is_own for name, facts in facts_of(outcome).items()} == {"again.weight": True}
    assert (outcome.findings[0].ranks, outcome.findings[0].code) == ((0, 1), Cause.MISSING_REDUCTION)


def test_what_is_no_sum_of_the_parts_has_no_cause(judge: Judge) -> None:
    def disturb(name: str, of_ranks: list[Tensor]) -> Tensor:
        mean = average(name, of_ranks)
        return mean.roll(1, dims=0) if name == "wide.weight" else mean

    outcome = judge(train(torch.bfloat16, disturb))
    assert facts_of(outcome) == {"wide.weight": GradientSumFacts()}
    assert outcome.findings[0].code == Cause.BACKWARD


def test_a_gradient_that_is_no_number_is_found(judge: Judge) -> None:
    outcome = judge(train(torch.float32, partial(scaled, of="first.weight", factors=(1.0, float("nan")))))
    assert list(facts_of(outcome)) == ["first.weight"]


def test_parameters_of_two_modules_are_left_alone() -> None:
    model = Layers(torch.float32)
    model.tied = nn.Linear(130, 130, bias=False)
    model.tied.weight = model.again.weight
    watch = GradientSumWatch(model, "none")
    watch.begin_step(0)
    (model(torch.randn(5, 100)).sum() + model.tied(torch.randn(5, 130)).sum()).backward()
    watch.close()
    assert not {"again.weight", "tied.weight"} & set(watch.report().get(0, {}))
    assert "wide.weight" not in watch.report().get(1, {})


@pytest.mark.parametrize(
    "parts",
    [
        [Region.box((20, 300), [range(7), range(300)]), Region.box((20, 300), [range(7, 20), range(300)])],
        [
            Region.box((20, 300), [(0, 3, 9, 12), range(300)]),
            Region.box((20, 300), [range(15, 20), range(300)]),
        ],
        [Region.run((20, 300), 0, 2711), Region.run((20, 300), 2711, 6000)],
        [Region.run((300,), 5, 200), Region.run((300,), 200, 300)],
        [Region.box((300,), [range(299, -1, -1)])],
    ],
)
def test_a_sample_is_found_in_the_parts_of_a_tensor(parts: list[Region]) -> None:
    shape = parts[0].shape
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    sample = Sample.of(*shape)
    matrix = whole.reshape(-1, shape[-1])
    wanted = matrix[list(sample.rows)][:, list(sample.columns)].flatten()
    held = torch.cat([region.take(whole).flatten() for region in parts]).tolist()
    found = {}
    for region in parts:
        places, positions = sample.find_in(region)
        values = region.take(whole).flatten()
        found |= {place: int(values[position]) for place, position in zip(places, positions, strict=True)}
    assert found == {place: int(value) for place, value in enumerate(wanted) if int(value) in set(held)}
    assert len(found) > 20


def make_program() -> Any:
    from moeverify.train.assemble import assemble_single

    return assemble_single(make_case("x", recipe={"precision": "float32"}).recipe, torch.device("cpu"))


@pytest.mark.parametrize(
    ("case", "is_made"),
    [
        (make_case("x", recipe={"float8": "rowwise", "precision": "mixed"}, dp_shard=2), True),
        (make_case("x", recipe={"float8": "rowwise", "precision": "bfloat16"}, cp=2, dp_shard=2, ep=2), True),
        (make_case("x", recipe={"float8": "rowwise", "precision": "mixed"}, dp_shard=4, ep=2, etp=2), True),
        (make_case("x", recipe={"precision": "mixed"}, dp_shard=2), False),
        (make_case("x", recipe={"precision": "bfloat16"}, checks=ASKED, dp_shard=2), True),
        (make_case("x", recipe={"precision": "bfloat16"}, checks=ASKED, pp=2), False),
        (make_case("x", recipe={"float8": "rowwise_with_gw_hp"}, dp_shard=2), False),
        (make_case("x", recipe={"float8": "rowwise", "precision": "mixed"}, dp_shard=2, tp=2), False),
        (make_case("x", recipe={"float8": "rowwise", "precision": "bfloat16"}, pp=2), False),
    ],
)
def test_it_is_made_where_noise_hides_gradients_and_ranks_hold_whole_layers(
    case: Case, is_made: bool
) -> None:
    pytest.importorskip("torchao")
    run: Any = type("Run", (), {"case": case})()
    program: Any = make_program()
    watch = GradientSum().watch(run, program)
    assert (watch is not None) is is_made
    if watch is not None:
        watch.close()
