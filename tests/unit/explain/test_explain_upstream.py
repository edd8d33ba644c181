"""Lines before the first wrong operation: integers, detached tensors and numbers that enter it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from generated import explain
from recordings import a_group, make, record_call
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moeverify.explain.agreement import is_block
from moeverify.explain.culprits import Culprits
from moeverify.explain.describe import read_expression
from moeverify.explain.explain import Explainer
from moeverify.explain.groups import follow_groups
from moeverify.explain.program import SETUP, Program
from moeverify.explain.record import Recorder
from moeverify.parallel.regions.region import Region
from moeverify.results.culprit import Culprit


def explain_call(run: Callable[..., Tensor], here: int, there: int) -> list[Culprit]:
    """Explain the results of a function for one number on the rank and another on one device."""
    return explain(
        record_call(lambda x: run(x, here), None, x=make(8, 4)),
        record_call(lambda x: run(x, there), None, x=make(8, 4)),
    )


def list_origins(culprit: Culprit) -> list[tuple[str, str]]:
    return [(each.kind, each.line.expression) for each in culprit.origins]


def test_the_first_integers_that_differ_are_named() -> None:
    def run(x: Tensor, first: int) -> Tensor:
        places = torch.arange(8)
        start = (places // 2) * 2
        begin = start.flip(0) if first else start
        warmth = torch.log1p((places - begin).double() / 3)
        return torch.tanh(x * warmth[:, None])

    culprit, *_ = explain_call(run, 4, 0)
    assert ("extra", "start.flip(0)") in list_origins(culprit)


def test_a_line_that_one_device_runs_for_another_caller_is_named_by_its_call() -> None:
    """The function is right; ranks alone call it a second time."""

    def double(places: Tensor) -> Tensor:
        return places * 2

    def run(x: Tensor, first: int) -> Tensor:
        begin = double(torch.arange(8))
        if first:
            begin = double(begin)
        warmth = torch.log1p((begin + 1).double() / 3)
        return torch.tanh(x * warmth[:, None])

    culprit, *_ = explain_call(run, 4, 0)
    assert ("extra", "double(begin)") in list_origins(culprit)
    assert ("extra", "places * 2") not in list_origins(culprit)


def test_a_tensor_that_is_detached_cuts_its_gradient() -> None:
    def run(x: Tensor, cuts: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        kept = leaf.sin()
        other = kept.detach() if cuts else kept
        (other * leaf.exp()).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    culprit, *_ = explain_call(run, 1, 0)
    assert ("cut", "kept.detach()") in list_origins(culprit)


def test_a_sharded_weight_that_is_detached_cuts_its_gradient() -> None:
    """Its local tensor, which operators take, has no gradient in any case."""
    recorder = Recorder()
    with a_group():
        weight = distribute_tensor(make(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
        with recorder.recording():
            weight.detach().sin()
    assert [read_expression(sites[0]) for _, _, sites in recorder.program.cuts] == ["weight.detach()"]


class Gather(torch.autograd.Function):
    """A gather by one rank, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def gather(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_gather([out], x)
    return out


@pytest.mark.parametrize(
    ("call", "is_cut"),
    [
        (gather, True),
        (torch.no_grad()(gather), True),
        (Gather.apply, False),
        (lambda x: gather(x.detach()), True),
        (lambda x: x.sum(), False),
    ],
    ids=["collective", "without gradients", "own gradient", "detached", "no collective"],
)
def test_a_collective_cuts_the_gradient_of_what_it_takes(
    call: Callable[[Tensor], Tensor], *, is_cut: bool
) -> None:
    recorder = Recorder()
    x = make(4, 4).requires_grad_()
    with a_group(), recorder.recording():
        call(x * 2.0)
    assert len(recorder.program.cuts) == is_cut


def test_a_number_that_one_device_does_not_have_is_named_with_its_definition() -> None:
    def run(x: Tensor, size: int) -> Tensor:
        share = 3 / size
        return torch.tanh(x * share)

    culprit, *_ = explain_call(run, 7, 5)
    assert ("definition", "3 / size") in list_origins(culprit)


def test_a_tensor_that_no_rank_has_whole_names_the_line_that_cut_it() -> None:
    def record(count: int) -> Program:
        recorder = Recorder()
        with recorder.recording():
            whole = make(4, 2)
            index = count - 1
            part = whole.chunk(2)[index].clone() if count else whole.clone()
            recorder.name_tensors([("w", part)])
            held = Region.box((4, 2), [range(2), range(2)]) if count else Region.whole((4, 2))
            recorder.observe(SETUP, "initial_weight", "w", part, held)
        return recorder.program

    explainer = Explainer([record(1)], record(0), SETUP, ())
    maker = Culprits(explainer).make_makers()["w"]
    assert maker.absent == ((0, 2, 4),)
    origins = list_origins(maker)
    assert origins[0] == ("made", "whole.chunk(2)[index].clone()")
    assert ("definition", "count - 1") in origins


def test_a_view_of_all_elements_does_not_hide_the_line_that_chose_them() -> None:
    def record(count: int) -> Program:
        recorder = Recorder()
        with recorder.recording():
            whole = make(4, 2)
            part = whole[:2].clone() if count else whole.clone()
            seen = part.view(-1, 2)
            recorder.name_tensors([("w", seen)])
            recorder.observe(SETUP, "initial_weight", "w", seen, Region.whole((4, 2)))
        return recorder.program

    explainer = Explainer([record(1)], record(0), SETUP, ())
    assert list_origins(Culprits(explainer).make_makers()["w"])[0] == ("made", "whole[:2].clone()")


def test_a_copy_of_a_tied_weight_that_takes_a_part_of_its_gradient_is_named() -> None:
    def record(is_tied: bool) -> Program:
        recorder, weight = Recorder(), make(4, 4, seed=1).requires_grad_()
        x = make(6, 4)
        recorder.name_tensors([("x", x), ("w", weight)])
        with recorder.recording():
            head = weight if is_tied else weight.detach().clone().requires_grad_()
            recorder.begin_step(0)
            ((x @ weight).sin() @ head).square().sum().backward()
            assert weight.grad is not None
            recorder.observe(0, "gradient", "w", weight.grad, Region.whole((4, 4)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    explainer = Explainer([record(False)], record(True), 0, ())
    culprits = Culprits(explainer)
    (cause,) = explainer.explain(20.0)
    culprit = culprits.trace(culprits.make(cause), cause)
    assert culprit.mechanism == "moved"
    assert ("made", "weight.detach().clone()") in list_origins(culprit)


class Exchange(torch.autograd.Function):
    """Rows in another order, as an all-to-all gives them. Its backward pass runs no operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Previous(torch.autograd.Function):
    """A value that the next rank takes. Its backward pass returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize(("on_ranks", "line"), [(1, "return grad"), (2, "return None")])
def test_the_backward_function_that_returns_a_wrong_gradient_is_named(on_ranks: int, line: str) -> None:
    def run(x: Tensor, variant: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        made = leaf.sin()
        moved = Exchange.apply(made) if variant == 1 else made.flip(0)
        last = Previous.apply(made[-2:]) if variant == 2 else made[-2:]
        (moved.exp().sum() + (last * last.exp()).sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    culprit, *_ = explain_call(run, on_ranks, 0)
    assert ("derivative", line) in list_origins(culprit)


def test_zeros_that_ranks_alone_create_are_named_behind_moves() -> None:
    def leave_out(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def add(x: Tensor) -> Tensor:
        return x.new_zeros(1, 1) + x.sin()

    def run(x: Tensor, on_ranks: int) -> Tensor:
        halo = leave_out(x[:1, :1]) if on_ranks else add(x[:1, :1])
        joined = torch.cat([halo, x.cos().reshape(-1, 1)])
        return joined[:32] * x.reshape(-1, 1).exp()

    culprit, *_ = explain_call(run, 1, 0)
    assert ("extra", "torch.zeros_like(x)") in list_origins(culprit)


def test_definitions_of_right_values_are_left_out() -> None:
    """The operation takes no number, and one device defines its values in the same lines."""

    def run(x: Tensor, on_ranks: int) -> Tensor:
        right = x.sin()
        taps = right if right.ndim else x
        return torch.minimum(x, taps) if on_ranks else torch.maximum(x, taps)

    culprit, *_ = explain_call(run, 1, 0)
    assert "definition" not in [each.kind for each in culprit.origins]


def test_a_call_from_a_line_that_one_device_does_not_run_is_named() -> None:
    def shared(x: Tensor, scale: float) -> Tensor:
        return (x * scale).sin()

    def run(x: Tensor, on_ranks: int) -> Tensor:
        if on_ranks:
            return shared(x, 3.0)
        return shared(x, 2.0)

    culprit, *_ = explain_call(run, 1, 0)
    assert list_origins(culprit) == [("definition", "3.0")]
    assert culprit.origins[0].is_branch


def test_the_lines_that_make_a_group_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group(dist.ProcessGroup):
        group_name = "pair"

    group = Group(0, 1)
    monkeypatch.setattr(dist, "new_group", lambda: group)
    program = Program()
    with follow_groups(program):
        dist.new_group()
        torch.optim.SGD([torch.zeros(1)], lr=1.0)
    ((sites,),) = program.groups.values()
    assert sites[0].function == "test_the_lines_that_make_a_group_are_kept"
    assert [sites[0].line + 1] == [each[0].line for each in program.optimizers]
    dist.new_group()
    assert len(program.groups["pair"]) == 1


def test_executed_lines_are_kept_by_step() -> None:
    def build() -> int:
        return len("setup")

    def step() -> int:
        return len("step")

    recorder = Recorder()
    with recorder.recording():
        build()
        recorder.begin_step(0)
        step()
    first = build.__code__.co_firstlineno
    assert {at: [line - first for _, line in found] for at, found in recorder.program.lines.items()} == {
        SETUP: [1],
        0: [step.__code__.co_firstlineno + 1 - first],
    }


def test_lines_are_kept_around_an_operator_and_inside_one_that_python_computes() -> None:
    @torch.library.custom_op("moeverify_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def run(x: Tensor) -> Tensor:
        y = x.sin().cos()
        y = doubled(y)
        return y.exp()

    recorder = Recorder()
    with recorder.recording():
        run(torch.ones(2))
    lines = {line for _, line in recorder.program.lines[SETUP]}
    assert {run.__code__.co_firstlineno + line for line in (1, 2, 3)} <= lines
    assert doubled._init_fn.__code__.co_firstlineno + 2 in lines


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tracing is not paused there")
def test_the_handling_of_an_operator_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def note(recorder: Recorder, func: Callable[..., Tensor], args: tuple[Tensor], named: object) -> Tensor:
        seen.append(sys.gettrace())
        return func(*args)

    x = torch.ones(2)
    monkeypatch.setattr(Recorder, "_note", note)
    with Recorder().recording():
        x.sin()
        assert sys.gettrace() is not None
    assert seen
    assert not any(seen)


def test_positions_that_restart_are_no_block_of_those_of_one_device() -> None:
    whole = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 2.0])
    assert is_block(whole[3:] + 0, whole, {}) is True
    assert is_block(whole[1:4], whole, {}) is False
    assert is_block(torch.tensor([0.0, 1.0]), whole, {(2, 6): 2}) is False
    assert is_block(whole[2:4], whole, {(2, 6): 2}) is True
    assert is_block(whole[:4], whole, {}) is None


def test_a_number_that_changes_nothing_is_the_wrong_one_and_not_its_reader() -> None:
    def run(x: Tensor, share: int) -> Tensor:
        scaled = x * (share / 5)
        return torch.tanh(scaled)

    culprit, *_ = explain_call(run, 5, 4)
    assert (culprit.mechanism, culprit.numbers, culprit.proved) == ("number", (("1.0", "0.8"),), True)
    assert culprit.here.line is not None
    assert culprit.here.line.expression == "x * (share / 5)"


def test_a_factor_is_a_wrong_number_where_the_line_takes_another_one() -> None:
    """The multiple of a right value is known, and only its reader seems wrong."""

    def run(x: Tensor, heads: int) -> Tensor:
        scores = x * (0.25 if heads == 5 else 0.35)
        return scores.softmax(-1)

    culprit, *_ = explain_call(run, 5, 4)
    assert (culprit.mechanism, culprit.numbers) == ("number", (("0.25", "0.35"),))
    assert culprit.here.line is not None
    assert culprit.here.line.expression.startswith("x * (0.25")


def test_a_number_that_a_call_passes_on_is_followed_to_its_definition() -> None:
    """The line of the call makes a tensor, and its argument is a number."""

    def attend(x: Tensor, scale: float) -> Tensor:
        scores = x * scale
        return scores.softmax(-1)

    def run(x: Tensor, heads: int) -> Tensor:
        scale = 1.25 / heads
        return attend(x, scale)

    culprit, *_ = explain_call(run, 5, 4)
    assert [each.line.expression for each in culprit.origins][:1] == ["1.25 / heads"]


def test_a_number_that_decides_whether_parallel_code_runs_is_named() -> None:
    def refresh(x: Tensor) -> Tensor:
        return x.cos()

    def run(x: Tensor, batches: int) -> Tensor:
        made = x.sin()
        count = 1
        count += batches
        if count % 2 == 0:
            made = refresh(x)

        return made * 2.0

    culprit, *_ = explain_call(run, 1, 2)
    (found,) = [each for each in culprit.origins if each.kind == "condition"]
    assert (found.line.expression, found.here, found.there) == ("count += batches", "2", "3")
