"""A listener receives the calls of a loop, and torch is unchanged once its hooks are removed."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import SGD, Optimizer, lr_scheduler

from moeverify.train.calls.hooks import install
from moeverify.train.calls.listener import Listener


class Heard(Listener):
    """A listener that keeps the names of calls and the norms of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.norms: list[float] = []

    def note_call(self, label: str, owner: object = None) -> None:
        self.names.append(label)

    def before_backward(self) -> None:
        self.names.append("backward")

    def before_zero_grad(self) -> None:
        self.names.append("zero_grad")

    def after_clip(self, label: str, norm: object, limit: object) -> None:
        self.names.append(label)
        self.norms.append(float(str(norm.item()))) if isinstance(norm, torch.Tensor) else None

    def before_step(self, optimizer: Optimizer, values: object, named: object) -> None:
        self.names.append("step")


def list_places() -> list[object]:
    """Return every function that `install` may wrap, in torch's current state."""
    schedulers = [each for each in vars(lr_scheduler).values() if inspect.isclass(each)]
    return [
        torch.autograd.backward,
        Optimizer.zero_grad,
        nn.Module.zero_grad,
        nn.utils.clip_grad_norm_,
        nn.utils.clip_grad.clip_grad_norm_,
        nn.utils.clip_grads_with_norm_,
        FullyShardedDataParallel.clip_grad_norm_,
        torch.amp.GradScaler.step,
        *(vars(each).get("step") for each in schedulers),
    ]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_a_loop_is_heard_in_its_order(model: nn.Module) -> None:
    heard = Heard()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    hooks = install(heard)
    try:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        gradients = [weight.grad for weight in model.parameters()]
        total = nn.utils.get_total_norm([each for each in gradients if each is not None])
        nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.5, total)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    finally:
        hooks.remove()
    assert heard.names == [
        *("zero_grad", "backward", "clip_grads_with_norm_", "clip_grad_norm_"),
        *("step", "scheduler step"),
    ]
    # A clip by a given norm returns nothing: its norm is the caller's argument.
    assert heard.norms == pytest.approx([float(total), 0.5], rel=1e-5)


def test_removed_hooks_leave_torch_as_it_was(model: nn.Module) -> None:
    before = list_places()
    heard = Heard()
    hooks = install(heard)
    heard.on_model()
    during = list_places()
    hooks.remove()
    assert all(now is not then for now, then in zip(during[:8], before[:8], strict=True))
    assert list_places() == before
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert heard.names == []
