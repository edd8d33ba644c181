"""Lines that call the backward pass: those that one device does not call are shown, as in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from recordings import list_ops, make
from torch import Tensor

from moeverify.explain.joint import Joint
from moeverify.explain.program import Program
from moeverify.explain.record import Recorder
from moeverify.explain.user_lines import UserLines

X = make(3, 4)


class Square(torch.autograd.Function):
    """x * x, with its derivative in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 2.0


def train_whole(x: Tensor) -> None:
    Square.apply(x.sin()).sum().backward()


def train_stages(x: Tensor) -> None:
    first = x.sin()
    taken = first.detach().requires_grad_()
    Square.apply(taken).sum().backward()
    torch.autograd.backward([first], [taken.grad * 2.0])


def record(train: Callable[[Tensor], None]) -> Program:
    recorder = Recorder()
    x = X.clone().requires_grad_()
    with recorder.recording():
        recorder.begin_step(0)
        train(x)
    return recorder.program


def list_root_lines(program: Program, name: str) -> list[str]:
    lines = UserLines(Joint([program]), record(train_whole))
    ops = [op for op in list_ops(program, name) if op.phase == "backward"]
    return [origin.line.expression for op in ops for origin in lines.list_roots((0, op.number))]


def test_the_call_of_each_backward_pass_is_recorded() -> None:
    whole, stages = record(train_whole), record(train_stages)
    assert [sites[0].function for _, sites in whole.roots] == ["train_whole"]
    assert [sites[0].function for _, sites in stages.roots] == ["train_stages", "train_stages"]
    first, second = (sites[0].line for _, sites in stages.roots)
    assert second == first + 1
    (cosine,) = list_ops(stages, "cos")
    assert stages.root_of(cosine.number)[0].line == second
    assert Program().root_of(0) == ()


def test_a_call_that_one_device_does_not_make_is_shown() -> None:
    stages = record(train_stages)
    assert list_root_lines(stages, "cos") == ["torch.autograd.backward([first], [taken.grad * 2.0])"]
    assert list_root_lines(stages, "mul")[0] == "Square.apply(taken).sum().backward()"
    assert list_root_lines(record(train_whole), "cos") == []
