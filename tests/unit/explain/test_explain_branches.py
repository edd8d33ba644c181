"""Lines of functions that both sides run: branches that ranks alone take, conditions, readers and parts of sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recordings import data_of, list_ops, make, record_call
from torch import Tensor, nn

from moeverify.explain.cause import OperatorCause
from moeverify.explain.culprits import Culprits
from moeverify.explain.edit import Edit
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Changes, Joint
from moeverify.explain.program import Program, Site
from moeverify.explain.record import Recorder
from moeverify.explain.syntax import RETURNED
from moeverify.explain.upstream import Upstream
from moeverify.explain.user_lines import UserLines
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind

WEIGHT = make(4, 4, seed=7)


def record(run: Callable[[Tensor, int], dict[str, Tensor]], on_ranks: int, kind: Kind) -> Program:
    """Record a function whose results are shown as tensors of a kind, in the optimizer's phase."""
    recorder = Recorder()
    x = make(8, 4)
    recorder.name_tensors({"x": x}.items())
    with recorder.recording():
        recorder.begin_step(0)
        for name, each in run(x, on_ranks).items():
            recorder.observe(0, kind, name, each, Region.whole(tuple(each.shape)))
    recorder.program.shares = [((0,), (0,))]
    return recorder.program


def find_causes(ranks: list[Program], one: Program) -> tuple[list[OperatorCause], Explainer]:
    explainer = Explainer(ranks, one, 0, (2.0,))
    causes = explainer.explain(20, proves=False)
    assert causes
    return causes, explainer


def list_lines(ranks: list[Program], one: Program) -> list[tuple[str, str]]:
    """Return (kind, expression) of the lines to look at, for all causes."""
    causes, explainer = find_causes(ranks, one)
    upstream = Upstream(explainer)
    return [(each.kind, each.line.expression) for cause in causes for each in upstream.find(cause)]


def list_lines_of(run: Callable[[Tensor, int], Tensor]) -> list[tuple[str, str]]:
    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    return list_lines([ranks], one)


def list_branches(run: Callable[[Tensor, int], Tensor]) -> list[str]:
    return [expression for kind, expression in list_lines_of(run) if kind == "branch"]


def test_a_branch_that_computes_an_operand_is_named() -> None:
    def choose(x: Tensor, on_ranks: int) -> Tensor:
        if on_ranks:
            return x * 1.0
        return x.roll(1, 0)

    def run(x: Tensor, on_ranks: int) -> Tensor:
        taken = choose(x, on_ranks)
        return (taken @ WEIGHT + x).sin()

    assert "return x * 1.0" in list_branches(run)


def test_a_condition_without_an_executed_arm_is_no_branch() -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        for _ in range(on_ranks):
            if len(x) > 100:
                x = x.roll(1, 0)
        return (x @ WEIGHT * (1.5 + on_ranks)).sin()

    assert not [line for line in list_lines_of(run) if line[0] in ("branch", "sole")]


def test_a_line_without_an_operator_that_decides_a_replaced_value_is_named() -> None:
    """The added value is right by itself, but the repair replaces it."""

    def count(x: Tensor, on_ranks: int) -> Tensor:
        share = 0.3
        if on_ranks:
            share = 3e-1
        return x.exp() * share

    def run(x: Tensor, on_ranks: int) -> Tensor:
        added = count(x, on_ranks)
        return (x.cos() if on_ranks else x.sin()) + added

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    explainer = Explainer([ranks], one, 0, ())
    (add,), (added,) = list_ops(ranks, "add"), list_ops(ranks, "mul")
    replaced = Changes(values={(0, added.results[0]): torch.zeros(8, 4)})
    repair = Edit("operand", ((0, add.number),), replaced)
    upstream = Upstream(explainer)
    for repairs, is_named in (([repair], True), ([], False)):
        cause = OperatorCause([(0, add.number)], repairs, explainer.wrong[:1])
        lines = [each.line.expression for each in upstream.find_branches(cause) if each.kind == "branch"]
        assert ("share = 3e-1" in lines) is is_named


def test_the_line_of_ranks_alone_that_picks_a_replaced_value_is_named_alone() -> None:
    """Lines before it run on ranks alone, too, but compute right values."""

    def shift(x: Tensor, on_ranks: int) -> Tensor:
        if on_ranks:
            return x.double() + 0.5
        return x + 0.5

    def run(x: Tensor, on_ranks: int) -> Tensor:
        scores = shift(x, on_ranks).sigmoid()
        biased = scores + 0.5
        chosen = biased.topk(2, -1).indices
        weights = None
        if on_ranks:
            weights = biased.gather(1, chosen)
        weights = scores.gather(1, chosen) if weights is None else weights
        return (weights / weights.sum(-1, keepdim=True)).log() @ WEIGHT[:2]

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    explainer = Explainer([ranks], one, 0, ())
    (total,), (picked,), (right,) = (
        list_ops(*each) for each in ((ranks, "sum"), (ranks, "gather"), (one, "gather"))
    )
    replaced = Changes(values={(0, picked.results[0]): data_of(one, right.results[0])})
    cause = OperatorCause(
        [(0, total.number)], [Edit("operand", ((0, total.number),), replaced)], explainer.wrong
    )
    upstream = Upstream(explainer)
    (line,) = upstream.find(cause)
    assert (line.kind, line.line.expression) == ("branch", "weights = biased.gather(1, chosen)")


def test_a_right_result_that_follows_from_a_wrong_one_excludes_no_branch() -> None:
    def run(x: Tensor, on_ranks: int) -> dict[str, Tensor]:
        update = x.exp() * x.sign()
        if on_ranks:
            update = x * 2.0
        return {"update": update, "sign": update.sign()}

    ranks, one = (record(run, on_ranks, Kind.UPDATE) for on_ranks in (True, False))
    assert ("branch", "update = x * 2.0") in list_lines([ranks], one)


def test_a_branch_after_the_first_wrong_operation_is_not_named() -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        made = (x @ (WEIGHT.cosh() if on_ranks else WEIGHT.sinh())).tanh()
        if on_ranks:
            made.detach().sum()
        return made

    assert not [each for each in list_branches(run) if "detach" in each]


def test_a_function_of_the_ranks_alone_has_no_branches() -> None:
    def transform(x: Tensor) -> Tensor:
        return (x @ WEIGHT.cosh()).tanh()

    def run(x: Tensor, on_ranks: int) -> Tensor:
        return transform(x) if on_ranks else (x @ WEIGHT.sinh()).tanh()

    assert list_branches(run) == []


def test_a_choice_that_one_device_does_not_make_is_named() -> None:
    def choose(scores: Tensor) -> Tensor:
        return scores[:, :3].topk(2, dim=-1).indices

    def run(x: Tensor, on_ranks: int) -> Tensor:
        scores = (x @ WEIGHT).sigmoid()
        chosen = choose(scores) if on_ranks else scores.topk(2, dim=-1).indices
        weights = scores.gather(1, chosen)
        return (weights / weights.sum(-1, keepdim=True)).log()

    assert ("extra", "scores[:, :3].topk(2, dim=-1)") in list_lines_of(run)


def test_the_condition_under_which_right_results_are_written_is_named() -> None:
    def update(weight: Tensor) -> Tensor:
        return weight.mul_(0.5).sub_(0.1)

    def step(weights: list[Tensor], on_ranks: int) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(1)

        def write(*_: object) -> None:
            for number, weight in enumerate(weights):
                if on_ranks and number % 3 == 2:
                    continue
                update(weight)

        optimizer.step = torch.no_grad()(write)
        optimizer.step()

    def run(x: Tensor, on_ranks: int) -> dict[str, Tensor]:
        weights = [x * scale for scale in (1.0, 1.1, 1.2, 1.3)]
        step(weights, on_ranks)
        return {str(number): weight for number, weight in enumerate(weights)}

    ranks, one = (record(run, on, Kind.WEIGHT) for on in (1, 0))
    for program in (ranks, one):
        for op in program.ops:
            if op.written:
                op.phase = "step"
    lines = list_lines([ranks], one)
    assert ("missing", "weight.mul_(0.5).sub_(0.1)") in lines
    assert ("condition", "on_ranks and number % 3 == 2") in lines


def test_a_list_without_the_wrong_gradient_is_named_with_its_condition() -> None:
    def run(x: Tensor, on_ranks: int) -> dict[str, Tensor]:
        gradients = {name: x * scale for name, scale in (("a", 1.0), ("b", 1.1), ("c", 1.2), ("skip", 1.3))}
        coefficient = x.sum().sigmoid()
        chosen = [value for name, value in gradients.items() if not (on_ranks and name == "skip")]
        for gradient in chosen:
            gradient.mul_(coefficient)
        return gradients

    lines = list_lines([record(run, 1, Kind.GRADIENT)], record(run, 0, Kind.GRADIENT))
    assert ("missing", "gradient.mul_(coefficient)") in lines
    assert ("member", 'not (on_ranks and name == "skip")') in lines


def test_a_definition_that_was_not_executed_is_left_out() -> None:
    def scale_of(on_ranks: int) -> float:
        if on_ranks > 1:
            return 5.0 * on_ranks
        return 3.0 + on_ranks

    def run(x: Tensor, on_ranks: int) -> Tensor:
        return ((x @ WEIGHT).sin() * scale_of(on_ranks)).tanh()

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    explainer = Explainer([ranks], one, 0, ())
    culprits = Culprits(explainer)
    causes = explainer.explain(20)
    lines = [each for cause in causes for each in culprits.trace(culprits.make(cause), cause).origins]
    expressions = [each.line.expression for each in lines]
    assert "3.0 + on_ranks" in expressions
    assert "5.0 * on_ranks" not in expressions


def test_the_lines_that_make_a_part_of_a_sum_are_named() -> None:
    def square(x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True)

    def run(part: Tensor, whole: Tensor | None) -> Tensor:
        total = square(part)
        return (total + 0.5).rsqrt() if whole is None else (square(whole) + 0.5).rsqrt()

    x = make(8, 4)
    ranks = [record_call(lambda x: run(x, None), None, x=part.contiguous()) for part in x.chunk(2, dim=-1)]
    one = record_call(lambda x: run(x, x), None, x=x)
    assert ("part", "x.square().sum(-1, keepdim=True)") in list_lines(ranks, one)


def test_a_custom_gradient_is_named() -> None:
    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient.flip(0).clone()

    def run(x: Tensor, on_ranks: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        hidden = Flip.apply(leaf @ WEIGHT) if on_ranks else leaf @ WEIGHT
        (hidden.sin() * make(8, 4, seed=3)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert ("derivative", "gradient.flip(0).clone()") in list_lines_of(run)


def test_a_multiple_of_a_float32_weight_is_a_multiple() -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        # A quarter is an exact multiple; 0.3 times a float32 number is rounded.
        drawn = torch.randn(8, 4, generator=torch.Generator().manual_seed(len(x)))
        return (drawn * (0.25 if on_ranks else 0.3)).double()

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    (cause,) = Explainer([ranks], one, 0, ()).explain(20, proves=False)
    assert cause.known == "scale"
    assert cause.factor == pytest.approx(0.25 / 0.3, rel=1e-6)


def test_a_branch_that_computes_right_results_is_not_named() -> None:
    def copy(x: Tensor, on_ranks: int) -> Tensor:
        if on_ranks:
            return x * 1.0
        return x.clone()

    def run(x: Tensor, on_ranks: int) -> dict[str, Tensor]:
        taken = copy(x, on_ranks)
        factor = WEIGHT.cosh() if on_ranks else WEIGHT.sinh()
        return {"right": taken * WEIGHT[0], "wrong": (taken @ factor).sin()}

    ranks, one = (record(run, on, Kind.GRADIENT) for on in (1, 0))
    assert not [each for each in list_lines([ranks], one) if each[0] == "branch"]


def test_the_options_of_an_optimizer_are_defined_where_its_groups_are_made() -> None:
    def list_groups(weight: Tensor) -> list[dict[str, object]]:
        return [{"params": [weight], "lr": 2.0 * 0.25}]

    def run(x: Tensor, on_ranks: int) -> dict[str, Tensor]:
        weight = nn.Parameter(x.clone())
        weight.grad = make(8, 4, seed=5)
        torch.optim.SGD(list_groups(weight) if on_ranks else [weight], lr=0.1).step()
        return {"w": weight.detach()}

    ranks, one = (record(run, on, Kind.WEIGHT) for on in (1, 0))
    (cause, *_), explainer = find_causes([ranks], one)
    lines = UserLines(explainer.joint, one)
    assert cause
    assert '[{"params": [weight], "lr": 2.0 * 0.25}]' in [
        each.line.expression for each in lines.list_options(0)
    ]


def test_lines_that_ranks_leave_out_are_named_by_their_condition() -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        y = x.exp()
        if not on_ranks:
            y = y.clamp(max=1.5)
        return (y @ WEIGHT).sin()

    assert ("skipped", "not on_ranks") in list_lines_of(run)


def test_lines_after_a_call_that_ranks_leave_out_are_not_named() -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        y = x.cos() if on_ranks else x.sin()
        z = (y @ WEIGHT).tanh()
        if not on_ranks:
            z = z + 0.0
        return z

    assert not [line for line in list_lines_of(run) if line[0] == "skipped"]


def test_a_call_of_code_that_one_device_does_not_run_comes_after_other_branches() -> None:
    def begin(parts: list[Tensor]) -> None:
        parts.clear()

    def run(x: Tensor, on_ranks: int) -> Tensor:
        kept = [x]
        if on_ranks:
            begin(kept)
        y = x.exp()
        if on_ranks:
            y = y.floor()
        return (y @ WEIGHT).sin()

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    explainer = Explainer([ranks], one, 0, ())
    (last,) = list_ops(ranks, "sin")
    cause = OperatorCause([(0, last.number)], [], explainer.wrong[:1])
    found = [(each.kind, each.line.expression) for each in Upstream(explainer).find_branches(cause)]
    assert found == [("branch", "y = y.floor()"), ("parallel", "begin(kept)")]


def test_a_branch_whose_result_was_combined_into_a_right_value_is_not_named() -> None:
    """The ranks take their rows of a table in a branch, and the sum with it is right."""
    table = make(16, 4, seed=3)

    def run(x: Tensor, on_ranks: int, rows: int) -> Tensor:
        own = table[:8]
        if on_ranks:
            own = table[rows : rows + 8]
        y = (x.cos() + own).exp()
        return (y @ WEIGHT * (1.5 + on_ranks)).sin()

    def list_named(rows: int) -> list[str]:
        ranks, one = (record_call(lambda x, on=on: run(x, on, rows), None, x=make(8, 4)) for on in (1, 0))
        explainer = Explainer([ranks], one, 0, ())
        (last,) = list_ops(ranks, "sin")
        cause = OperatorCause([(0, last.number)], [], explainer.wrong[:1])
        return [each.line.expression for each in Upstream(explainer).find(cause)]

    assert "own = table[rows : rows + 8]" not in list_named(0)
    assert "own = table[rows : rows + 8]" in list_named(8)


@pytest.mark.parametrize("returned", ["<object> group", "<object>"])
def test_a_function_that_returns_groups_has_no_branches(returned: str) -> None:
    def find(x: Tensor, on_ranks: int) -> Tensor:
        y = (x.exp() @ WEIGHT).sin()
        if on_ranks:
            on_ranks += 1
        return (y * (1.0 + on_ranks)).cos()

    def run(x: Tensor, on_ranks: int) -> Tensor:
        return find(x, on_ranks)

    ranks, one = (record_call(lambda x, on=on: run(x, on), None, x=make(8, 4)) for on in (1, 0))
    texts = Path(__file__).read_text().splitlines()
    line = texts.index("        return (y * (1.0 + on_ranks)).cos()") + 1
    ranks.names[0][__file__, line, RETURNED] = [returned]
    assert (("branch", "on_ranks += 1") in list_lines([ranks], one)) == (returned == "<object>")


@pytest.mark.parametrize(
    "call", ["work.wait()", "module.no_sync()", "dist.barrier(group)", "x.device_mesh", "x.wait_all()"]
)
def test_calls_of_parallel_code_are_known_by_their_names(call: str, tmp_path: Path) -> None:
    path = tmp_path / "step.py"
    path.write_text(call + "\n")
    ranks, one = (record_call(lambda x: x.exp(), x=make(8, 4)) for _ in range(2))
    assert UserLines(Joint([ranks]), one).calls_parallel((str(path), 1)) == ("all" not in call)


@pytest.mark.parametrize("allocates", [True, False])
def test_a_branch_that_only_allocates_a_buffer_is_not_named(*, allocates: bool) -> None:
    def run(x: Tensor, on_ranks: int) -> Tensor:
        if on_ranks:
            _ = torch.empty_like(x) if allocates else torch.ones_like(x)
        return (x.exp() @ WEIGHT).sin() * (1.0 + on_ranks)

    lines = [expression for _, expression in list_lines_of(run)]
    assert any("torch.ones_like(x)" in line for line in lines) is not allocates


@pytest.mark.parametrize("is_later", [True, False])
def test_a_branch_after_the_wrong_operation_is_not_named(*, is_later: bool) -> None:
    state = {"scale": 1.0}

    def run(x: Tensor, on_ranks: int) -> Tensor:
        y = x.exp() @ WEIGHT
        if on_ranks and not is_later:
            state["scale"] = 2.0
        y = y.sin() * (1.0 + 2.0 * on_ranks)
        if on_ranks and is_later:
            state["scale"] = 4.0
        return y

    found = {expression for _, expression in list_lines_of(run)}
    assert found & {'state["scale"] = 2.0', 'state["scale"] = 4.0'} == (
        set() if is_later else {'state["scale"] = 2.0'}
    )


def test_the_calls_that_configure_fsdp_are_named_if_it_runs_the_operator(tmp_path: Path) -> None:
    path = tmp_path / "plan.py"
    path.write_text("fully_shard(model)\nfully_shard(model.experts)\nmodel.train()\n")
    ranks, one = (record_call(lambda x: x.sin(), x=make(2, 2)) for _ in range(2))
    ranks.lines[0] = {(str(path), line) for line in (1, 2, 3)}
    (op,) = list_ops(ranks, "sin")
    op.module = "layers.1.experts"
    lines = UserLines(Joint([ranks]), one)
    assert not list(lines.list_configuring((0, op.number)))
    op.sites = (Site(f"{Path(torch.__file__).parent}/distributed/fsdp/collectives.py", 1, "reduce"),)
    found = [(each.kind, each.line.line) for each in lines.list_configuring((0, op.number))]
    assert found == [("configures", 2), ("configures", 1)]
