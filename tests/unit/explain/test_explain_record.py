"""The recording of a step: values instead of memory, the parts of fused operators, and call sites."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from recordings import a_group, data_of, list_ops, make, record_call, result_of
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from moeverify.explain.describe import read_expression
from moeverify.explain.joint import Joint
from moeverify.explain.program import SETUP, Program
from moeverify.explain.record import Recorder
from moeverify.explain.suspects import find_targets
from moeverify.faults.catalogue import load_faults
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.train.assemble import assemble_single
from moeverify.verification.collectives.interception import is_over


def line_of(function: Callable[..., object], text: str) -> int:
    """Return the number of the only line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = (first + number for number, line in enumerate(lines) if text in line)
    return found


def test_a_write_in_place_makes_a_new_value() -> None:
    def run(a: Tensor) -> Tensor:
        doubled = a * 2
        doubled.add_(1)
        return doubled.exp()

    a = make(3)
    program = record_call(run, a=a)
    before, after = result_of(program, "mul"), result_of(program, "add_")
    assert torch.equal(data_of(program, before), a * 2)
    assert torch.equal(data_of(program, after), a * 2 + 1)
    assert list(list_ops(program, "exp")[0].refs()) == [after]


def test_initial_values_of_the_reference_model_are_inputs() -> None:
    """Of the hash of each element no operator is recorded, and the values are those without a recorder."""
    recipe = load_faults()["A01"].case.recipe

    def draw() -> dict[str, Tensor]:
        shards = assemble_single(recipe, torch.device("cpu")).shards
        return {shard.name: shard.local().detach().clone() for shard in shards}

    recorder = Recorder()
    with recorder.recording():
        drawn = draw()
    assert {name: value.tolist() for name, value in drawn.items()} == {
        name: value.tolist() for name, value in draw().items()
    }
    names = {op.short for op in recorder.program.ops}
    assert "copy_" in names
    assert not {name for name in names if "shift" in name or name.startswith("bitwise") or "and_" in name}


def test_a_view_is_a_value_of_what_it_is_a_view_of() -> None:
    def run(a: Tensor) -> Tensor:
        return a.t().exp()

    program = record_call(run, a=make(2, 3))
    view = program.values[result_of(program, "t")]
    assert program.values[view.alias].label == "a"
    assert list(list_ops(program, "exp")[0].refs()) == [view.number]


def test_memory_that_was_written_through_a_view_is_read_in_parts() -> None:
    def run(a: Tensor) -> Tensor:
        doubled = a * 2
        doubled[0].zero_()
        return doubled.exp()

    a = make(2, 3)
    program = record_call(run, a=a)
    (read,) = list_ops(program, "read")
    assert set(read.refs()) == {result_of(program, "mul"), result_of(program, "zero_")}
    assert list(list_ops(program, "exp")[0].refs()) == list(read.results)
    assert torch.equal(data_of(program, read.results[0]), torch.stack([torch.zeros(3), a[1] * 2]))


def test_memory_that_no_operator_has_changed_is_unseen() -> None:
    def run(a: Tensor) -> Tensor:
        doubled = a * 2
        doubled.numpy()[0] = 5.0
        return doubled.exp()

    program = record_call(run, a=make(3))
    unseen = result_of(program, "unseen")
    assert float(data_of(program, unseen)[0]) == 5.0
    assert list(list_ops(program, "exp")[0].refs()) == [unseen]


def test_what_nothing_has_changed_is_one_value() -> None:
    def run(a: Tensor) -> Tensor:
        return a.exp() * a.detach() + a

    program = record_call(run, a=make(3))
    assert list_ops(program, "unseen") == []
    assert [0 in list_ops(program, name)[0].refs() for name in ("exp", "mul", "add")] == [True] * 3
    assert [value.label for value in program.values].count("a") == 1


def _scale(x: Tensor) -> Tensor:
    return torch.tanh(x * 2)


def _call_scale(a: Tensor) -> Tensor:
    return _scale(a).sum()


def test_an_operator_has_the_lines_and_the_expression_that_call_it() -> None:
    program = record_call(_call_scale, a=make(3))
    (tanh,), (mul,) = list_ops(program, "tanh"), list_ops(program, "mul")
    here = [(site.file, site.line, site.function) for site in tanh.sites[:2]]
    assert here == [
        (__file__, line_of(_scale, "torch.tanh"), "_scale"),
        (__file__, line_of(_call_scale, "_scale(a)"), "_call_scale"),
    ]
    assert read_expression(tanh.sites[0]) == "torch.tanh(x * 2)"
    assert read_expression(mul.sites[0]) == "x * 2"


def test_parts_of_a_fused_operator_stand_for_it() -> None:
    program = record_call(F.silu, input=make(3))
    assert list_ops(program, "silu") == []
    assert [op.short for op in program.ops if op.step == 0 and op.short != "to"] == ["sigmoid", "mul"]


def test_lists_of_tensors_are_taken_apart() -> None:
    def run(a: Tensor, b: Tensor) -> Tensor:
        one, two = torch._foreach_mul([a, b], 3.0)
        return one + two

    a, b = make(3), make(3, seed=1)
    ops = list_ops(record_call(run, a=a, b=b), "mul")
    assert [list(op.refs()) for op in ops] == [[0], [1]]
    program = record_call(run, a=a, b=b)
    assert torch.equal(data_of(program, list_ops(program, "mul")[1].results[0]), b * 3)


@pytest.fixture
def trained() -> Program:
    """Return the first step of a model of two modules, the second one called twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3).double(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.second(self.first(x))
            result: Tensor = self.second(hidden)
            return result

    model, x = Twice(), make(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    recorder = Recorder()
    recorder.name_tensors(model.named_parameters())
    recorder.name_modules(model)
    with recorder.recording():
        recorder.begin_step(0)
        loss = model(x).square().sum()
        recorder.observe(0, Kind.LOSS, "total", loss, Region.whole(()))
        recorder.observe(0, Kind.LOSS, "none", None, Region.whole(()))
        loss.backward()
        optimizer.step()
    return recorder.program


def test_the_ends_of_modules_are_kept_forward_and_backward(trained: Program) -> None:
    ends = {(end.module, end.is_gradient, end.count) for end in trained.ends if end.module}
    calls = [("first", 0), ("second", 0), ("second", 1)]
    assert ends == {(name, is_gradient, count) for name, count in calls for is_gradient in (False, True)}
    outputs = [end.value for end in trained.ends if end.module == "second" and not end.is_gradient]
    assert outputs == [op.results[0] for op in list_ops(trained, "tanh")]
    assert {op.module for op in list_ops(trained, "tanh")} == {"second"}


def test_what_a_step_shows_is_marked(trained: Program) -> None:
    shown = trained.marks[0, Kind.LOSS, "total"][-1]
    loss = list_ops(trained, "sum")[0].results[0]
    assert (shown.value, shown.region) == (loss, Region.whole(()))
    assert trained.marks[0, Kind.LOSS, "none"][-1].value is None


def test_each_part_of_a_tensor_that_a_rank_holds_is_a_target_of_its_own() -> None:
    def record(*regions: Region, scale: float) -> Program:
        recorder, whole = Recorder(), torch.arange(12.0).reshape(4, 3) + 0.3
        with recorder.recording():
            recorder.begin_step(0)
            for number, region in enumerate(regions):
                part = region.take(whole) * (scale if number else 1.0)
                recorder.observe(0, Kind.GRADIENT, "w", part, region)
        return recorder.program

    parts = [Region.box((4, 3), (rows, range(3))) for rows in ((0, 2), (1, 3))]
    joint = Joint([record(*parts, scale=2.0)])
    wrong, right = find_targets(joint, record(Region.whole((4, 3)), scale=1.0), 0)
    assert [each.regions[0] for each in wrong] == parts[1:]
    assert [each.regions[0] for each in right] == parts[:1]


def test_a_derivative_has_the_lines_of_what_it_is_the_derivative_of(trained: Program) -> None:
    backward, forward = list_ops(trained, "tanh_backward"), list_ops(trained, "tanh")
    assert [op.origin for op in backward] == [op.number for op in reversed(forward)]
    assert {op.phase for op in backward} == {"backward"}
    for op in backward:
        assert op.sites == ()
        assert trained.sites_of(op) == trained.ops[op.origin].sites != ()
    assert {trained.ops[op.origin].module for op in backward} == {op.module for op in backward} == {"second"}


def test_what_an_optimizer_does_is_a_phase_of_its_own(trained: Program) -> None:
    step = [op for op in trained.ops if op.phase == "step"]
    assert {op.short for op in step} == {"add_"}
    written = [trained.values[number].label for op in step for number in op.results]
    assert written == ["first.weight", "first.bias"]


def test_what_was_there_before_the_first_step_belongs_to_no_step(trained: Program) -> None:
    leaves = [op for op in list_ops(trained, "leaf") if trained.values[op.results[0]].label]
    assert [(op.step, trained.values[op.results[0]].label) for op in leaves] == [
        (SETUP, "first.weight"),
        (SETUP, "first.bias"),
    ]


def test_where_there_is_no_room_values_are_left_out() -> None:
    recorder = Recorder(limit=5)
    a = make(3)
    with recorder.recording():
        a.exp().exp()
    assert not recorder.program.is_complete
    assert [value.data is None for value in recorder.program.values] == [False, True, True]
    assert record_call(torch.exp, input=a).is_complete


def test_nothing_is_recorded_in_a_pause() -> None:
    recorder = Recorder()
    with recorder.recording():
        with recorder.paused():
            make(3).exp()
        make(3).tanh()
    assert [op.short for op in recorder.program.ops if op.short in ("exp", "tanh")] == ["tanh"]


@pytest.mark.parametrize(
    ("knows", "races"),
    [("nothing", 1), ("wait", 0), ("future", 0), ("callback", 0), ("poll", 0), ("our own poll", 1)],
)
def test_memory_of_a_collective_is_free_once_the_program_knows_that_it_is_done(
    knows: str, races: int
) -> None:
    memory = make(3, 4)
    recorder = Recorder()
    with a_group(), recorder.recording():
        work = dist.all_reduce(memory, async_op=True)
        if knows == "wait":
            work.wait()
        elif knows == "future":
            work.get_future().wait()
        elif knows == "callback":
            work.get_future().then(lambda _: None).wait()
        while (knows == "poll" and not work.is_completed()) or (
            knows == "our own poll" and not is_over(work)
        ):
            pass
        memory.mul_(2)
        work.wait()
    assert len({race.op for race in recorder.program.races}) == races


def test_the_callback_of_a_collective_may_use_its_memory() -> None:
    memory = make(3, 4)
    recorder = Recorder()
    with a_group(), recorder.recording():
        work = dist.all_reduce(memory, async_op=True)
        with recorder.paused():
            completed = work.get_future()
        while not completed.done():
            pass
        work.get_future().then(lambda _: memory.mul_(2)).wait()
    assert not recorder.program.races


def test_memory_that_was_freed_is_not_read() -> None:
    freed, kept = make(300, 400), make(3)
    recorder = Recorder()
    recorder.name_tensors([("freed", freed)])
    with recorder.recording():
        freed.untyped_storage().resize_(0)
        with torch.no_grad():
            freed.set_(kept)  # type: ignore[call-overload]
        doubled = freed * 2
    assert torch.equal(doubled, kept * 2)
    assert list_ops(recorder.program, "mul")


@pytest.mark.parametrize(("use", "races"), [("read", 0), ("read and write", 1), ("wait and write", 0)])
def test_the_input_of_a_collective_may_be_read_and_not_written(use: str, races: int) -> None:
    memory, out = make(3, 4), make(3, 4)
    recorder = Recorder()
    with a_group(), recorder.recording():
        work = dist.all_gather([out], memory, async_op=True)
        if use.startswith("wait"):
            work.wait()
        memory.sum()
        if use.endswith("write"):
            memory.mul_(2)  # takes what it writes
        work.wait()
    assert len(recorder.program.races) == races


@pytest.mark.parametrize(
    ("rows", "races"), [(slice(3, 6), 0), (slice(2, 5), 1), (slice(0, 0), 0), ((slice(None), slice(1, 2)), 1)]
)
def test_a_race_needs_memory_that_both_use(rows: Any, races: int) -> None:
    memory = make(6, 4)
    recorder = Recorder()
    with a_group(), recorder.recording():
        work = dist.all_reduce(memory[:3], async_op=True)
        memory[rows].mul_(2)
        work.wait()
    assert len({race.op for race in recorder.program.races}) == races


def test_a_read_shows_the_last_write_of_each_part() -> None:
    memory = make(6, 4)
    recorder = Recorder()
    with recorder.recording():
        for part in (memory[:3], memory[3:], memory[:3]):
            part.mul_(2)
        memory.sum()
    *_, read = list_ops(recorder.program, "read")
    writes = list_ops(recorder.program, "mul_")
    assert list(read.reads()) == [op.results[-1] for op in writes[1:]]
    assert torch.equal(data_of(recorder.program, read.results[0]), memory)


def test_columns_of_one_tensor_share_no_memory() -> None:
    memory, out = make(6, 4), make(6, 2)
    recorder = Recorder()
    with a_group(), recorder.recording():
        work = dist.all_gather([out], memory[:, :2], async_op=True)
        memory[:, 2:].mul_(2)
        work.wait()
    assert not recorder.program.races


def test_a_collective_of_the_program_is_its_own_under_a_mode_of_torch_functions() -> None:
    """Such a mode puts torch's own dispatch of functions between the program and the collective."""
    memory = make(3, 4)
    recorder = Recorder()
    with a_group(), recorder.recording(), BaseTorchFunctionMode():
        work = dist.all_reduce(memory, async_op=True)
        memory.mul_(2)
        work.wait()
    assert [race.is_direct for race in recorder.program.races] == [True]
