"""Hooks on tensors for which a custom backward function returns no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moeverify.explain.record import Recorder
from moeverify.train.module_taps import hook_gradient


class Mask(torch.autograd.Function):
    """A product without a gradient for its second factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.mask = mask
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.mask, None


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.masks = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Mask.apply(self.values(x), self.masks(x))
        return made


def test_a_hook_hears_only_gradients() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    left, right = x * 2, y * 3
    heard: list[str] = []
    hook_gradient(left, lambda gradient: heard.append("left"))
    hook_gradient(right, lambda gradient: heard.append("right"))
    Mask.apply(left, right).sum().backward()
    assert heard == ["left"]


def test_a_module_whose_output_gets_no_gradient_is_recorded() -> None:
    model = Gate()
    recorder = Recorder()
    recorder.name_tensors(model.named_parameters())
    recorder.name_modules(model)
    with recorder.recording():
        recorder.begin_step(0)
        model(torch.ones(2, 3)).sum().backward()
    ends = {(end.module, end.is_gradient) for end in recorder.program.ends}
    assert ("values", True) in ends
    assert ("masks", False) in ends
    assert ("masks", True) not in ends
