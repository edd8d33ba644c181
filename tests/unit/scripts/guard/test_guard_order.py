"""The order of calls on one rank: two violations are a finding, a single or intended one is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from moeverify.parallel.regions.local_shard import parameters
from moeverify.results.script import MemberFacts
from moeverify.scripts.compare.calls import _has_one_optimizer
from moeverify.scripts.guard.detached import DetachedParts
from moeverify.scripts.guard.order import CallOrder
from moeverify.scripts.record.lines import Header, Options
from moeverify.scripts.record.read import RankRecord
from moeverify.train.calls.call import LoopCall
from moeverify.train.calls.listener import find_scale
from moeverify.train.calls.rules import find_misplaced_clip, find_scaled_clip

DISCARDS = ("forward", "backward", "zero_grad", "forward", "backward", "optimizer step")
CLIPS_EARLY = ("forward", "backward", "clip_grad_norm_", "forward", "backward", "optimizer step")
SCHEDULES = ("forward", "backward", "scheduler step", "forward", "backward", "optimizer step")
EMPTIES = ("forward", "backward", "forward", "backward", "zero_grad", "optimizer step")
CLIPS_LATE = ("zero_grad", "forward", "backward", "optimizer step", "clip_grad_norm_")
EVALUATES = ("zero_grad", "eval forward", "backward", "optimizer step")
NEVER_UNSCALES = ("zero_grad", "forward", "scaler scale", "backward", "optimizer step")
RIGHT = (
    "zero_grad",
    "forward",
    "backward",
    "forward",
    "backward",
    "clip_grad_norm_",
    "optimizer step",
    "scheduler step",
)


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def find(
    names: tuple[str, ...],
    num_steps: int = 2,
    rows: tuple[tuple[int, ...], ...] = ((1,), (2,)),
    *,
    num_optimizers: int = 1,
    kept: float = 0.0,
    has_closure: bool = False,
    has_gradients: bool = True,
    num_dropouts: int = 0,
    scale: float | None = None,
) -> list[str]:
    order = CallOrder()
    optimizers = [make_optimizer() for _ in range(num_optimizers)]
    for each in (each for optimizer in optimizers for each in optimizer.param_groups[0]["params"]):
        each.grad = torch.ones_like(each) if has_gradients else None
    found = []
    for step in range(num_steps):
        for optimizer in optimizers:
            own = optimizer.param_groups[0]["params"]
            order.see_step(optimizer, {id(each): kept for each in own})
        calls = [
            LoopCall(step=step, name=name, discarded=float(name == "zero_grad"), scale=scale)
            for name in names
        ]
        order.end_step(calls, rows, has_closure=has_closure, num_dropouts=num_dropouts)
        found += [finding.tensor for finding in order.find(step, 0)]
    return found


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (DISCARDS, "discarded"),
        (CLIPS_EARLY, "early-clip"),
        (CLIPS_LATE, "late-clip"),
        (SCHEDULES, "inner-scheduler"),
    ],
)
def test_a_rule_that_two_steps_break_is_found_once(names: tuple[str, ...], rule: str) -> None:
    assert find(names, 5) == [rule]
    assert not find(names, 1)


def test_a_right_order_is_silent() -> None:
    assert not find(RIGHT, 5)


def test_a_step_in_evaluation_mode_is_wrong_where_the_mode_matters() -> None:
    assert find(EVALUATES, 4, num_dropouts=2) == ["eval"]
    assert not find(EVALUATES, 4)  # never in training mode, and no dropout
    assert not find(("forward", *EVALUATES), 4, num_dropouts=2)  # an evaluation with gradients


def test_an_optimizer_that_steps_on_the_gradients_of_a_scaled_loss_is_found() -> None:
    assert find(NEVER_UNSCALES, 4, scale=1024.0) == ["scaled-step"]
    assert not find(NEVER_UNSCALES, 4)  # the scaler has unscaled them by a method of its own
    # The loss of another optimizer is scaled.
    assert not find((*NEVER_UNSCALES, "scaler step", "optimizer step"), 4, scale=1024.0)


def shuffle_epochs(*iterations: tuple[int, bool], shuffles: bool = True) -> list[str]:
    """Return the findings after iterations of a sampler, each with its epoch and whether a step is made on it."""
    order = CallOrder()
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0, shuffle=shuffles)
    for epoch, is_trained in iterations:
        sampler.set_epoch(epoch)
        order.begin_epoch(sampler, "a")
        for _ in range(2 * is_trained):
            order.see_training()
        order.end_epoch(sampler)
        order.see_training()  # a step on other data
    return [finding.tensor for finding in order.find(4, 0)]


def test_a_sampler_must_not_shuffle_two_epochs_of_training_alike() -> None:
    assert shuffle_epochs((0, True), (0, True)) == ["same-epoch"]
    assert not shuffle_epochs((0, False), (0, False))  # of evaluation
    assert not shuffle_epochs((0, True), (0, True), shuffles=False)
    assert not shuffle_epochs((0, True), (1, True))
    assert not shuffle_epochs((0, True), (1, True), (0, True))  # training of another model begins


def test_an_iteration_without_a_step_is_no_epoch() -> None:
    assert not shuffle_epochs((0, False), (0, True), (0, False), (1, True))  # looks at the first batch
    assert shuffle_epochs((0, True), (0, False), (0, True)) == ["same-epoch"]


def test_a_clip_without_a_limit_only_measures_the_norm() -> None:
    assert find_misplaced_clip(make_calls("backward", "clip_grad_norm_", "backward", limit=math.inf)) is None


def find_detached(*, is_called: bool = True, gives: bool = False) -> list[str]:
    """Return the parameters that are found in a model of which one part gets no gradients."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, each in model.named_parameters():
        each.grad = torch.ones_like(each) if gives or not name.startswith("0.") else None
    uses = {id(module): "a" for module in (model, *model) if is_called or module is not model[0]}
    parts, shards = DetachedParts(), list(parameters(model))
    found = [parts.find(optimizer, shards, [model], uses, (step, 0)) for step in range(5)]
    assert all(len(each) == (step == 2) for step, each in enumerate(found) if is_called and not gives)
    facts = [each.facts for step in found for each in step]
    return [name for each in facts if isinstance(each, MemberFacts) for name in ("0.weight", *each.others)]


def test_a_part_that_is_called_and_never_gets_a_gradient_is_found() -> None:
    assert find_detached() == ["0.weight", "0.bias"]
    assert not find_detached(is_called=False)
    assert not find_detached(gives=True)


def test_gradients_that_are_still_there_are_found() -> None:
    assert find(RIGHT, 4, kept=1.0) == ["kept"]


def test_a_zero_grad_behind_the_last_backward_pass_is_found_where_it_leaves_nothing() -> None:
    assert find(EMPTIES, 4, has_gradients=False) == ["emptied"]
    assert not find(EMPTIES, 4)  # it belonged to a part of the model
    assert not find(EMPTIES, 4, has_gradients=False, num_optimizers=2)


def test_what_is_thrown_away_on_purpose_is_no_finding() -> None:
    assert not find(DISCARDS, rows=((1,), (1,)))  # sharpness-aware minimization: the same rows again
    assert not find(DISCARDS, num_optimizers=2)  # two losses, each with its own optimizer
    assert not find(DISCARDS, has_closure=True)  # LBFGS
    skipped = ("forward", "backward", "scaler unscale", "scaler step", "zero_grad")
    assert not find((*skipped, "forward", "backward", "scaler unscale", "scaler step", "optimizer step"))


@pytest.mark.parametrize(
    ("momentum", "renews", "rules"), [(0.9, True, ["new-optimizer"]), (0.9, False, []), (0.0, True, [])]
)
def test_an_optimizer_that_each_step_makes_anew_loses_its_moments(
    momentum: float, renews: bool, rules: list[str]
) -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer, order, found = torch.optim.SGD(parameters, lr=0.1, momentum=momentum), CallOrder(), []
    for step in range(5):
        if renews:
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
        parameters[0].grad = torch.ones(2)
        order.see_step(optimizer, {})
        optimizer.step()
        order.end_step(make_calls(*RIGHT), [])
        found += [finding.tensor for finding in order.find(step, 0)]
    assert found == rules


def test_two_optimizers_of_the_same_parameters_keep_their_moments() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    both, order = [torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for _ in range(2)], CallOrder()
    for step in range(6):
        parameters[0].grad = torch.ones(2)
        order.see_step(both[step % 2], {})
        both[step % 2].step()
        order.end_step(make_calls(*RIGHT), [])
        assert not order.find(step, 0)
    assert any("several optimizers" in text for text in order.list_unjudged(has_closure=False))


def make_calls(*names: str, limit: float = 1.0, site: str = "a") -> list[LoopCall]:
    """Return calls whose clips have a limit, and a scaler with the loss scale 1024."""
    return [
        LoopCall(
            step=0, name=name, site=site, scale=1024.0, max_norm=limit if name.startswith("clip") else None
        )
        for name in names
    ]


def test_a_clip_of_scaled_gradients_is_wrong_unless_its_limit_is_scaled_too() -> None:
    scaled = ("backward", "clip_grad_norm_", "scaler step", "optimizer step")
    found = find_scaled_clip(make_calls(*scaled))
    assert found is not None
    assert found.norm == 1024.0
    assert find_scaled_clip(make_calls(*scaled, limit=1024.0)) is None
    assert find_scaled_clip(make_calls("backward", "scaler unscale", *scaled[1:])) is None
    assert find_scaled_clip(make_calls("backward", "clip_grad_norm_", "optimizer step")) is None
    assert (
        find_scaled_clip(make_calls("backward", "clip_grad_norm_", "scaler unscale", "scaler step"))
        is not None
    )


def test_a_scaler_that_unscales_by_a_method_of_its_own_leaves_no_scale() -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), make_optimizer()
    parameters = optimizer.param_groups[0]["params"]
    scaler.scale(sum(each.sum() for each in parameters)).backward()
    assert find_scale(scaler) == 1024.0
    scaler.unscale_(optimizer)
    assert find_scale(scaler) is None
    assert find_scale(optimizer) is None


def test_a_clip_in_the_loop_is_wrong_although_the_last_one_follows_all_backward_passes() -> None:
    loop = make_calls("backward", "clip_grad_norm_", "backward", "clip_grad_norm_")
    found = find_misplaced_clip([*loop, *make_calls("clip_grad_norm_", site="b")])
    assert found is not None
    assert found.actual == 2
    # Two losses, each with a clip of its own parameters.
    own = [call.model_copy(update={"target": place}) for place, call in enumerate(loop)]
    assert find_misplaced_clip(own) is None


def test_parameters_of_another_copy_of_the_model_are_named() -> None:
    model, copied = nn.Linear(2, 2), nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    order = CallOrder()
    for _ in range(2):
        order.see_step(torch.optim.SGD(copied.parameters(), lr=0.1), {})
        order.end_step([], [])
    assert order.is_idle
    assert order.find_forgotten(parameters(model)) == ("weight", "bias")


def test_parameters_that_no_optimizer_has_are_named_unless_it_has_copies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    for known, expected in ((model[:2], ("2.weight", "2.bias")), (model[:1], ()), (model, ())):
        order = CallOrder()
        optimizer = torch.optim.SGD(known.parameters(), lr=0.1)
        for _ in range(2):
            order.see_step(optimizer, {})
            order.end_step([], [])
        assert order.find_forgotten(parameters(model)) == expected


def test_an_old_copy_of_the_model_is_named_although_the_optimizer_trains_another_parameter() -> None:
    model, old, extra = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    (model(torch.ones(1, 2)).sum() * extra).backward()
    order = CallOrder()
    optimizer = torch.optim.SGD([*old.parameters(), extra], lr=0.1)
    for _ in range(2):
        order.see_step(optimizer, {})
        order.end_step([], [])
    assert order.find_forgotten(parameters(model)) == ("weight", "bias")
    assert order.is_replaced
    assert not order.is_idle


def test_two_optimizers_of_one_class_are_told_from_two_groups_of_one() -> None:
    record = RankRecord(Header(rank=0, world_size=1, first=0, last=1), Path(), None)
    record.options = [
        Options(step=0, optimizer="AdamW", number=number, options={}, names=()) for number in (0, 1)
    ]
    assert _has_one_optimizer(record, 0)
    record.options.append(Options(step=0, optimizer="AdamW", number=0, options={}, names=()))
    assert not _has_one_optimizer(record, 0)
