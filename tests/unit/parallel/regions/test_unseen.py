"""Hooks on modules that selective activation checkpointing recomputes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moeverify.parallel.regions.unseen import unseen


def keep_products(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU(), nn.Linear(4, 4, bias=False), nn.GELU())
    return layers.to(torch.float64)


def train(layers: nn.Sequential, *, selective: bool) -> list[Tensor]:
    x = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    if selective:
        contexts = lambda: create_selective_checkpoint_contexts(keep_products)  # noqa: E731
        output = checkpoint(layers, x, use_reentrant=False, context_fn=contexts)
    else:
        output = layers(x)
    output.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layers.parameters())]


def test_what_a_hook_computes_is_none_of_the_modules_operations() -> None:
    expected = train(make_layers(), selective=False)
    layers, seen = make_layers(), []

    def watch(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if not seen:  # in the forward pass only, like hooks that count passes
            seen.append(output.detach() @ output.detach().t())

    layers[0].register_forward_hook(unseen(watch))
    gradients = train(layers, selective=True)
    assert len(seen) == 1
    for gradient, right in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, right)


def test_a_hook_keeps_its_name_and_its_result() -> None:
    def halve(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] / 2,)

    assert unseen(halve).__name__ == "halve"
    layer = nn.Identity()
    layer.register_forward_pre_hook(unseen(halve))
    assert torch.equal(layer(torch.ones(2)), torch.full((2,), 0.5))
