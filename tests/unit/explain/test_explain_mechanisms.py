"""Explanations of small programs: module outputs, restored state and moved operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from generated import explain, explain_call, expression_of
from recordings import make, record_call
from torch import Tensor, nn

from moeverify.explain.content import Elements
from moeverify.explain.culprits import Culprits
from moeverify.explain.describe import read_expression
from moeverify.explain.edits import list_removals
from moeverify.explain.explain import Explainer
from moeverify.explain.program import SETUP, Program
from moeverify.explain.record import Recorder
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.culprit import Culprit


class Scores(nn.Module):
    """Scores of rows, optionally divided by their sum."""

    def __init__(self, *, divides: bool) -> None:
        super().__init__()
        self.divides = divides

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.sigmoid()
        chosen = scores.amax(-1)
        return chosen, scores / scores.sum(-1, keepdim=True) if self.divides else scores


def record_model(model: nn.Module, x: Tensor) -> Program:
    recorder = Recorder()
    recorder.name_tensors([("x", x)])
    recorder.name_modules(model)
    with recorder.recording():
        recorder.begin_step(0)
        chosen, scores = model(x)
        loss = (chosen * 3).sum() + scores.square().sum()
        recorder.observe(0, Kind.LOSS, "total", loss, Region.whole(()))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def test_what_a_module_returns_is_told_from_what_it_uses_inside() -> None:
    wrapped = [nn.Sequential(Scores(divides=divides)) for divides in (False, True)]
    x = make(4, 5)
    (culprit,) = explain(record_model(wrapped[0], x), record_model(wrapped[1], x))
    assert culprit.mechanism == "returned"
    assert culprit.proved
    assert culprit.results == ("0",)
    assert expression_of(culprit) == "x.sigmoid()"
    assert culprit.there is not None
    assert culprit.there.operator == "div"
    assert culprit.repaired == ("loss/total",)


def test_a_module_that_returns_the_same_is_not_blamed() -> None:
    x = make(4, 5)
    wrong = record_model(nn.Sequential(Scores(divides=True)), x * 1.5)
    assert all(
        culprit.mechanism != "returned"
        for culprit in explain(wrong, record_model(nn.Sequential(Scores(divides=True)), x))
    )


def test_a_number_that_was_restored_is_traced_to_the_line_that_changed_it() -> None:
    def load(*, ahead: bool) -> Callable[..., Tensor]:
        def run(count: Tensor) -> Tensor:
            restored = count + 1 if ahead else count
            restored.add_(1)
            return restored

        return run

    (culprit,) = explain_call(load(ahead=True), load(ahead=False), count=torch.tensor(3.0))
    assert culprit.mechanism == "operand"
    assert culprit.proved
    assert culprit.made is not None
    assert culprit.made.line is not None
    assert culprit.made.line.expression == "count + 1"


def test_an_operator_that_one_device_has_too_is_not_to_be_left_out() -> None:
    def run(x: Tensor, *, twice: bool) -> Tensor:
        scaled = x * 0.5
        return scaled * 0.5 if twice else scaled

    def record(*, twice: bool) -> Program:
        return record_call(lambda x: run(x, twice=twice), None, x=make(6))

    def list_removed(*, twice: bool) -> list[str]:
        one, ranks = record(twice=False), record(twice=twice)
        explainer = Explainer([ranks], one, 0, [])
        ops = [[(0, op.number)] for op in ranks.ops if op.short == "mul"]
        edits = [edit for each in ops for edit in list_removals(explainer.alignment, each)]
        return [read_expression(ranks.ops[edit.ops[0][1]].sites[0]) for edit in edits]

    assert list_removed(twice=False) == []
    assert list_removed(twice=True) == ["scaled * 0.5"]


def test_an_operator_on_lists_is_a_counterpart_of_the_operator_on_a_tensor() -> None:
    def ranks(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        w.mul_(0.999)
        w.addcdiv_(a, b, value=-0.25)
        return w.clone()

    def one(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        torch._foreach_addcdiv_([w], [a], [b], [-0.25])
        return w.clone()

    (culprit,) = explain_call(ranks, one, w=make(6), a=make(6, seed=1), b=make(6, seed=2).abs() + 1)
    assert culprit.mechanism == "scale"
    assert culprit.proved
    assert expression_of(culprit) == "w.mul_(0.999)"
    assert abs(culprit.factor - 0.999) < 1e-12


def test_the_moves_of_a_mixed_operand_are_shown_and_not_what_computed_it() -> None:
    def ranks(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        both = (x @ torch.cat([a, b], -1)).view(len(x), -1, 2, 2)
        return torch.tanh(both[:, :, 0].flatten(1)) * both[:, :, 1].flatten(1)

    def one(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x @ a) * (x @ b)

    culprits = explain_call(ranks, one, x=make(8, 4), a=make(4, 6, seed=1), b=make(4, 6, seed=2))
    first = culprits[0]
    assert first.mechanism == "operand"
    assert first.proved
    assert expression_of(first).startswith("torch.tanh(")
    assert [move.line.expression for move in first.moves if move.line is not None][
        -1
    ] == "both[:, :, 0].flatten(1)"
    assert first.taken is not None
    assert len(first.taken.others) == 1


def test_a_moment_of_an_earlier_step_is_a_stale_one() -> None:
    culprit_code = Culprit.model_validate(
        {
            "mechanism": "operand",
            "proved": True,
            "here": {"operator": "lerp_", "phase": "step"},
            "taken": {"operation": _moment(0), "step": 0},
            "right": {"operation": _moment(1), "step": 1},
        }
    ).code
    assert culprit_code == Cause.STALE


def _moment(step: int) -> dict[str, object]:
    return {"operator": "lerp_", "line": {"file": "train.py", "line": 3}, "phase": "step", "step": step}


def test_memory_that_is_filled_has_the_elements_of_what_fills_it() -> None:
    def run(w: Tensor) -> Tensor:
        copy = torch.empty_like(w)
        copy.copy_(w)
        return copy * 2

    program = record_call(run, w=make(3, 4))
    elements = Elements(program)
    (copied,) = [op.results[-1] for op in program.ops if op.short == "copy_"]
    (given,) = [value.number for value in program.values if value.label == "w"]
    ids = elements.ids[given]
    assert ids is not None
    assert torch.equal(elements.ids[copied], ids)  # type: ignore[arg-type]


def test_values_that_the_loader_has_not_written_are_told_with_the_line_that_wrote_the_others() -> None:
    def forget(weight: Tensor) -> None:
        weight.copy_(torch.randn(4, 5, dtype=torch.float64))

    def load(weight: Tensor, seed: int) -> None:
        weight.copy_(make(4, 5, seed=seed))

    def record(*, skipped: str) -> Program:
        recorder = Recorder()
        weights = {name: torch.zeros(4, 5, dtype=torch.float64) for name in "abcd"}
        with recorder.recording():
            for seed, (name, weight) in enumerate(weights.items()):
                forget(weight)
                if name != skipped:
                    load(weight, seed)
            for name, weight in weights.items():
                recorder.observe(SETUP, Kind.INITIAL_WEIGHT, name, weight, Region.whole((4, 5)))
        return recorder.program

    explainer = Explainer([record(skipped="c")], record(skipped=""), SETUP, [])
    (culprit,) = [Culprits(explainer).make(cause) for cause in explainer.explain(10.0)]
    assert culprit.mechanism == "written"
    assert culprit.here.line is not None
    assert culprit.here.line.function == "forget"
    assert culprit.made is not None
    assert culprit.made.line is not None
    assert culprit.made.line.function == "load"


@pytest.mark.parametrize("fill", [-torch.inf, -1e30])
def test_a_wrong_mask_is_told_from_wrong_scores(fill: float) -> None:
    def ranks(q: Tensor, k: Tensor) -> Tensor:
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(2)  # one key too many
        return (q @ k.T).masked_fill(hidden, fill).softmax(-1)

    def one(q: Tensor, k: Tensor) -> Tensor:
        mask = torch.zeros(6, 6, dtype=torch.float64)
        mask[torch.ones(6, 6, dtype=torch.bool).triu(1)] = -torch.inf
        return (q @ k.T + mask).softmax(-1)

    (culprit,) = explain_call(ranks, one, q=make(6, 8), k=make(6, 8, seed=1))
    assert (culprit.mechanism, culprit.proved, culprit.names_cause) == ("created", True, False)
    assert culprit.here.line is not None
    assert "triu(2)" in culprit.here.line.expression


class Counter(nn.Module):
    """Module that adds the magnitudes of its input to a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        self.seen += y.abs().sum(0)
        return y


def record_counter(x: Tensor, passes: int, *, clears: bool = False) -> Program:
    """Record a step that scales its output by a buffer; `passes` of other inputs come before it."""
    model, recorder = Counter(), Recorder()
    recorder.name_tensors([("x", x), ("seen", model.seen)])
    recorder.name_modules(model)

    def warm_up() -> None:
        for number in range(passes):
            model(make(3, 5, seed=7 + number))
        if clears:
            model.seen.zero_()

    with recorder.recording():
        warm_up()
        recorder.begin_step(0)
        y = model(x)
        recorder.observe(0, Kind.LOSS, "total", (y * model.seen).sum(0), Region.whole((5,)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


@pytest.mark.parametrize("passes", [1, 2])
def test_writes_of_passes_that_one_device_does_not_run_are_left_out(passes: int) -> None:
    x = make(4, 5)
    (culprit,) = explain(record_counter(x.clone(), passes), record_counter(x, 0))
    assert (culprit.mechanism, culprit.proved) == ("removed", True)
    assert expression_of(culprit) == "self.seen += y.abs().sum(0)"
    assert "warm_up" in {caller.function for caller in culprit.here.callers}
    assert culprit.repaired == ("loss/total",)


def test_passes_whose_writes_are_cleared_are_not_blamed() -> None:
    x = make(4, 5)
    assert not explain(record_counter(x.clone(), 2, clears=True), record_counter(x, 0))


def test_a_tensor_that_is_initialized_again_is_wrong_where_its_value_is_computed() -> None:
    def record(*, again: bool) -> Program:
        recorder = Recorder()
        inverse, x = torch.arange(1.0, 6.0, dtype=torch.float64).reciprocal(), make(4, 5)
        recorder.name_tensors([("inverse", inverse), ("x", x)])

        def rebuild() -> None:
            rebuilt = inverse.sin()
            inverse.copy_(rebuilt)

        with recorder.recording():
            if again:
                rebuild()
            recorder.begin_step(0)
            recorder.observe(0, Kind.LOSS, "total", (x * inverse).sum(0), Region.whole((5,)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    (culprit,) = explain(record(again=True), record(again=False))
    assert expression_of(culprit) == "inverse.sin()"


class Mixture(nn.Module):
    """Weighted experts: the weights multiply their outputs, or by mistake their inputs."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__()
        self.router, self.expert, self.is_late = nn.Module(), nn.Tanh(), is_late

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        weights = 2 * scores / scores.sum(-1, keepdim=True)
        y: Tensor = self.expert(x) * weights if self.is_late else self.expert(x * weights)
        return y


def test_an_edit_that_makes_only_the_next_module_right_is_no_cause() -> None:
    # 2 * scores / (2 * scores) is 1: the expert then gets the right input, and what follows stays wrong.
    def record(*, is_late: bool) -> Program:
        model, recorder = nn.Sequential(Mixture(is_late=is_late)), Recorder()
        x, scores = make(4, 5), make(4, 5, seed=1).sigmoid()
        recorder.name_tensors([("x", x), ("scores", scores)])
        recorder.name_modules(model)
        with recorder.recording():
            recorder.begin_step(0)
            y = model[0](x, scores)
            recorder.observe(0, Kind.LOSS, "total", y.sum(0), Region.whole((5,)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    found = explain(record(is_late=False), record(is_late=True))
    assert all(culprit.mechanism != "operator" for culprit in found)
    assert all("weights" in expression_of(culprit) for culprit in found)


def test_a_value_to_which_one_device_does_more_is_told_with_what_follows() -> None:
    def make_weight(*, is_whole: bool) -> Callable[..., Tensor]:
        def run(x: Tensor, y: Tensor) -> Tensor:
            drawn = x.sin()
            return drawn * y if is_whole else drawn

        return run

    inputs = {"x": make(4, 5), "y": make(4, 5, seed=1)}
    (culprit,) = explain_call(make_weight(is_whole=False), make_weight(is_whole=True), **inputs)
    assert culprit.mechanism == "moved"
    assert [each.line.expression for each in culprit.moves_there if each.line] == ["drawn * y"]


@pytest.mark.parametrize("is_flat", [False, True])
def test_another_number_of_chosen_values_is_found_though_what_follows_has_other_sizes(
    *, is_flat: bool
) -> None:
    def choose(count: int) -> Callable[..., Tensor]:
        def run(scores: Tensor) -> Tensor:
            weights, ids = scores.sigmoid().topk(count, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
            if not is_flat:
                return torch.zeros_like(scores).scatter(-1, ids, weights).sum(0)
            tokens = torch.arange(6).repeat_interleave(count)
            places = tokens, ids.reshape(6 * count)
            return torch.zeros_like(scores).index_put(places, weights.reshape(6 * count)).sum(0)

        return run

    culprit, *_ = explain_call(choose(4), choose(2), scores=make(6, 8))
    assert (culprit.mechanism, culprit.proved, culprit.numbers) == ("number", True, (("4", "2"),))
    assert expression_of(culprit) == "scores.sigmoid().topk(count, dim=-1)"


def test_shown_values_of_another_number_are_left_to_later_results() -> None:
    def show(count: int) -> Program:
        recorder, scores = Recorder(), make(6, 8)
        recorder.name_tensors([("scores", scores)])
        with recorder.recording():
            recorder.begin_step(0)
            weights, ids = scores.sigmoid().topk(count, dim=-1)
            recorder.observe(0, Kind.ROUTER_IDS, "router", ids, Region.whole(tuple(ids.shape)))
            recorder.observe(0, Kind.LOSS, "total", weights.sum(), Region.whole(()))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    found = explain(show(4), show(2))
    assert {culprit.here.operator for culprit in found} <= {"topk", "sum"}
    assert found


def test_sizes_of_a_rank_s_part_are_no_other_number() -> None:
    def expand(rows: int, *, wrong: bool) -> Callable[..., Tensor]:
        def run(x: Tensor) -> Tensor:
            places = torch.arange(1.0, 6.0, dtype=x.dtype).expand(rows, 5)
            return (x[:rows] * places).sin().sum(0) * (1.5 if wrong else 1.0)

        return run

    found = explain_call(expand(2, wrong=True), expand(4, wrong=False), x=make(4, 5))
    assert all("expand" not in expression_of(culprit) for culprit in found)


class Stage(nn.Module):
    """Linear layer, whose output the ranks return as its exponential."""

    def __init__(self, *, returns_exponential: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(make(4, 4, seed=2))
        self.returns_exponential = returns_exponential

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return y.exp() if self.returns_exponential else y


def record_stage(stage: Stage, change: Callable[[Tensor], Tensor] | None) -> Program:
    """Record a step of a stage; `change` changes the gradient of its output."""
    recorder = Recorder()
    recorder.name_tensors([("weight", stage.weight)])
    recorder.name_modules(nn.Sequential(stage))
    with recorder.recording():
        recorder.begin_step(0)
        y = stage(make(3, 4))
        y = y.log() if stage.returns_exponential else y
        if change is not None:
            y.register_hook(change)
        loss = y.square().sum()
        recorder.observe(0, Kind.LOSS, "total", loss, Region.whole(()))
        loss.backward()  # type: ignore[no-untyped-call]
        assert stage.weight.grad is not None
        recorder.observe(0, Kind.GRADIENT, "weight", stage.weight.grad, Region.whole((4, 4)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def test_a_forward_value_that_is_right_again_is_not_blamed_for_a_gradient() -> None:
    ranks = record_stage(Stage(returns_exponential=True), lambda gradient: gradient.clamp(max=0.1))
    (culprit,) = explain(ranks, record_stage(Stage(returns_exponential=False), None))
    assert expression_of(culprit) == "gradient.clamp(max=0.1)"
    assert culprit.here.phase == "backward"


def test_a_multiple_of_an_earlier_value_is_told_where_only_the_place_is_known() -> None:
    def record_steps(*, is_kept: bool) -> Program:
        recorder, x = Recorder(), make(6, 4)
        recorder.name_tensors([("x", x)])
        kept = None
        with recorder.recording():
            for step in range(2):
                recorder.begin_step(step)
                weight = x * (step + 1.3)
                decay = (kept if is_kept and kept is not None else weight.tanh()) * (step + 1.0)
                kept = kept if kept is not None else weight.tanh()
                recorder.observe(step, Kind.WEIGHT, "w", (x.sin() + decay).cos(), Region.whole((6, 4)))
        recorder.program.shares = [((0,), (0,))]
        return recorder.program

    explainer = Explainer([record_steps(is_kept=True)], record_steps(is_kept=False), 1, (2.0,))
    (cause,) = explainer.explain(20, proves=False)
    culprit = Culprits(explainer).make(cause)
    assert (culprit.mechanism, culprit.operand) == ("place", 1)
    assert culprit.taken is not None
    assert (culprit.taken.scale, culprit.taken.step) == (2.0, 0)
