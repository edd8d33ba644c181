"""Results that prove others: right losses prove the forward pass, and replicas that add up are parts of a sum."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from recordings import list_ops, make, record_call
from torch import Tensor, nn

from moeverify.explain import known
from moeverify.explain.cause import OperatorCause
from moeverify.explain.counterparts import Counterparts
from moeverify.explain.culprits import Culprits
from moeverify.explain.describe import list_numbers
from moeverify.explain.edit import Edit
from moeverify.explain.edits import list_edits
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Changes
from moeverify.explain.program import Program
from moeverify.explain.proof import Proof
from moeverify.explain.record import Recorder
from moeverify.explain.shorten import Shortener
from moeverify.explain.suspects import list_independent
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind

WEIGHT = make(4, 4, seed=7)


class Shifted(nn.Module):
    """A product, plus a number for which its caller corrects."""

    def forward(self, x: Tensor, shift: float) -> Tensor:
        return x @ WEIGHT + shift


class Reverse(torch.autograd.Function):
    """Identity that reverses the rows of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].flip(0)


def record(on_ranks: bool, *, loss_scale: float = 1.0) -> Program:
    """Record a step whose module has another output on the ranks, and whose gradients are reversed there."""
    recorder, x = Recorder(), make(8, 4)
    model = nn.ModuleDict({"inner": Shifted()})
    recorder.name_modules(model)
    recorder.name_tensors([("x", x)])
    with recorder.recording():
        recorder.begin_step(0)
        leaf = x.clone().requires_grad_()
        shift = 3.0 if on_ranks else 0.0
        made = model["inner"](leaf, shift)
        squares = made * made - 2 * shift * made + shift**2  # of `made` without the shift
        if on_ranks:
            squares = Reverse.apply(squares)
        loss = (squares * make(8, 4, seed=3)).sum() * loss_scale
        loss.backward()
        assert leaf.grad is not None
        recorder.observe(0, Kind.LOSS, "total", loss.detach(), Region.whole(()))
        recorder.observe(0, Kind.GRADIENT, "x", leaf.grad, Region.whole((8, 4)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def list_first(ranks: Program, one: Program) -> list[str]:
    causes = Explainer([ranks], one, 0, ()).explain(20, proves=False)
    return [ranks.ops[cause.ops[0][1]].phase for cause in causes]


def test_a_right_loss_proves_the_forward_pass() -> None:
    assert list_first(record(True), record(False)) == ["backward"]


def test_a_wrong_loss_proves_nothing() -> None:
    assert list_first(record(True, loss_scale=1.5), record(False))[0] == "forward"


@pytest.mark.parametrize(("scale", "is_proven"), [(1.0, True), (1.5, False)])
def test_right_gradients_prove_the_backward_pass(scale: float, is_proven: bool) -> None:
    def record_gradient(scale: float) -> Program:
        recorder, x = Recorder(), make(8, 4)
        recorder.name_tensors([("x", x)])
        with recorder.recording():
            recorder.begin_step(0)
            leaf = x.clone().requires_grad_()
            (leaf.sin().sum() * scale).backward()
            assert leaf.grad is not None
            recorder.observe(0, Kind.GRADIENT, "x", leaf.grad, Region.whole((8, 4)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    ranks = record_gradient(scale)
    backward = {(0, op.number) for op in ranks.ops if op.phase == "backward" and op.short == "mul"}
    assert (backward <= Explainer([ranks], record_gradient(1.0), 0, ())._proven) is is_proven


def run(parts: tuple[int, ...]) -> Program:
    recorder, x = Recorder(), make(8, 4)
    recorder.name_tensors([("x", x)])
    with recorder.recording():
        recorder.begin_step(0)
        made = [partial(torch.sin, x), partial(torch.cos, x)]
        total = torch.stack([made[part]() for part in parts]).sum(0) if len(parts) > 1 else made[parts[0]]()
        recorder.observe(0, Kind.GRADIENT, "w", total, Region.whole((8, 4)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def test_replicas_that_add_up_are_not_reduced() -> None:
    # Each rank's value equals one that one device computes on the way to its sum.
    (cause,) = Explainer([run((0,)), run((1,))], run((0, 1)), 0, ()).explain(20, proves=False)
    assert cause.known == "reduction"


def test_another_size_of_a_new_tensor_proves_nothing() -> None:
    def run_with(size: int) -> Program:
        return record_call(lambda x: x * torch.arange(size).sum(), None, x=make(8, 4))

    ranks, one = run_with(6), run_with(8)
    explainer = Explainer([ranks], one, 0, ())
    (at,) = [(0, op.number) for op in ranks.ops if op.short == "arange"]
    counterparts = Counterparts(explainer.alignment, explainer.one)
    edits = list_edits(explainer.alignment, explainer.one, counterparts, (at,))
    (edit,) = [each for each in edits if each.kind == "number"]
    assert list_numbers(ranks.ops[at[1]], edit.others[at]) == [("6", "8")]
    proof = Proof(
        explainer.joint,
        explainer.alignment,
        explainer.one,
        explainer.landmarks,
        explainer.right,
        explainer.wrong,
    )
    assert proof.resize(edit, explainer.joint.execute(Changes())) is None


def test_the_axis_of_a_missing_reduction_is_that_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks (0, 1) and (2, 3) hold the same parts: all four are wrong, and two add up. The layout has these groups.
    monkeypatch.setattr(known, "_list_groups", lambda joint: [(0, 1), (2, 3)])

    def scaled(factor: Tensor) -> Program:
        recorder, x = Recorder(), make(8, 4)
        recorder.name_tensors([("x", x)])
        with recorder.recording():
            recorder.begin_step(0)
            recorder.observe(0, Kind.GRADIENT, "w", x * factor, Region.whole((8, 4)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    part, whole = make(4, seed=3), make(4, seed=5)
    ranks = [scaled(part), scaled(whole - part)] * 2
    explainer = Explainer(ranks, scaled(whole), 0, (), {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]})
    culprits = Culprits(explainer)
    (cause,) = explainer.explain(20, proves=False)
    culprit = culprits.make(cause)
    assert (culprit.mechanism, culprit.axes) == ("reduction", ("tp",))


def test_a_right_result_of_a_wrong_one_does_not_refute_a_repair() -> None:
    # An update by signs is right although both parts of its gradient are wrong, and not after a repair of one part.
    def run_with(first: float, second: float) -> Program:
        recorder, x, other = Recorder(), make(8, 4), make(8, 4, seed=2)
        recorder.name_tensors([("x", x), ("other", other)])
        with recorder.recording():
            recorder.begin_step(0)
            part = x.sin() * first
            gradient = part + x.sin() * second
            for kind, name, value in (
                (Kind.LOSS, "total", part),
                (Kind.GRADIENT, "w", gradient),
                (Kind.UPDATE, "w", gradient.sign()),
                (Kind.UPDATE, "v", other.cos()),
            ):
                recorder.observe(0, kind, name, value, Region.whole((8, 4)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    explainer = Explainer([run_with(1.5, -1.2)], run_with(0.8, 0.7), 0, ())
    right = list_independent(explainer.joint, explainer.right, explainer.wrong)
    assert [each.mark[2] for each in explainer.right] == ["w", "v"]
    assert [each.mark[2] for each in right] == ["v"]
    first, *_ = explainer.explain(20)
    assert first.repaired == ["loss/total"]


def test_a_change_that_no_result_needs_is_left_out_of_a_chain() -> None:
    def run_with(first: float, second: float, third: float) -> Program:
        recorder, x = Recorder(), make(8, 4)
        recorder.name_tensors([("x", x)])
        with recorder.recording():
            recorder.begin_step(0)
            one, two = x.sin() * first, x.cos() * second
            recorder.observe(0, Kind.BUFFER, "two", two, Region.whole((8, 4)))
            recorder.observe(0, Kind.LOSS, "total", (one + two).tanh() * third, Region.whole((8, 4)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    ranks, one = run_with(1.5, 1.2, 0.9), run_with(0.8, 0.7, 0.6)
    explainer = Explainer([ranks], one, 0, ())
    counterparts = Counterparts(explainer.alignment, explainer.one)
    total = next(each for each in explainer.wrong if each.mark[2] == "total")
    chain = []
    for at in [(0, op.number) for op in ranks.ops if op.short == "mul"][:2]:
        edits = list_edits(explainer.alignment, explainer.one, counterparts, (at,))
        edit = next(each for each in edits if each.kind == "number")
        chain.append(OperatorCause([at], [edit], [total]))
    both = explainer.joint.execute(chain[0].repairs[0].changes | chain[1].repairs[0].changes)
    kept, _ = Shortener(explainer.joint, explainer.proof, explainer.wrong).shorten(
        chain, both, total, [], explainer.joint.execute(Changes())
    )
    assert kept == chain[1:]  # the loss stays wrong, and the buffer needs the second change alone


def test_a_total_that_repairs_a_loss_and_no_gradient_proves_nothing() -> None:
    """Half of each part enters a sum over ranks: the total in its place is halved too, and counted twice."""
    parts = [make(6, 4, seed=seed) for seed in range(2)]

    def run(x: Tensor) -> Tensor:
        return (x * 0.5).sin()

    ranks = [record_call(run, x=part) for part in parts]
    explainer = Explainer(ranks, record_call(lambda x: x.sin(), x=sum(parts)), 0, (2.0, 0.5))
    state = explainer.joint.execute(Changes())
    op = (0, list_ops(ranks[0], "sin")[0].number)
    total, removed = Edit("total", (op,), Changes()), Edit("removed", (op,), Changes())
    assert not explainer.proof.may_be_chance(total, state)
    (target,) = explainer.wrong
    gradient = replace(target, mark=(0, Kind.GRADIENT, "w"))
    explainer.wrong.append(gradient)
    assert explainer.proof.may_be_chance(total, state)
    assert not explainer.proof.may_be_chance(removed, state)
