"""The steps that ranks make otherwise are found from graphs of small functions, each rank with rows of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moeverify.diagnose.graph.edits import Comparison
from moeverify.diagnose.graph.first_step import find_first_step
from moeverify.diagnose.graph.found import Graphs, _exchanges, _says_nothing
from moeverify.diagnose.graph.joined import OneDevice, Ranks, Values
from moeverify.diagnose.graph.record import Graph, GraphMode
from moeverify.results.other_steps import OtherStep, Term

Compute = Callable[[Tensor], Tensor]
WEIGHT = torch.linspace(-1.0, 1.0, 48, dtype=torch.float64).reshape(6, 8)
OTHER = torch.linspace(0.3, 2.0, 48, dtype=torch.float64).reshape(6, 8).roll(5, 0)
BACK = torch.linspace(-0.5, 0.8, 48, dtype=torch.float64).reshape(8, 6)
BIAS = torch.linspace(0.2, 0.9, 8, dtype=torch.float64)
NAMES = {WEIGHT.data_ptr(): "weight", OTHER.data_ptr(): "other", BIAS.data_ptr(): "bias"}
INPUT = torch.sin(torch.arange(48, dtype=torch.float64) * 1.7).reshape(8, 6)
END = ("forward", "layer", "output", "0", 0)
BEGIN = ("forward", "layer", "input", "0", 0)
BOUND = 1e-9


def record(compute: Compute, values: Tensor) -> Graph:
    mode = GraphMode(NAMES)
    with mode:
        output = compute(values)
    mode.note_end(END, output)
    mode.note_end(BEGIN, values)
    return mode.graph


def find(right: Compute, wrong: Compute) -> tuple[OtherStep, ...] | None:
    """Return what two ranks, with half of the rows each, make otherwise than one device."""
    return tell(record(right, INPUT), [record(wrong, rows.clone()) for rows in INPUT.chunk(2)])


def tell(golden: Graph, graphs: list[Graph]) -> tuple[OtherStep, ...] | None:
    one, ranks = OneDevice(golden), Ranks(range(len(graphs)), graphs)
    values = Values(one, ranks, BOUND)
    edits = Comparison(values).compare(
        ranks.find_all([graph.ends for graph in graphs], END[:4]), (golden.ends[END],)
    )
    return None if edits is None else Graphs(golden, graphs, BOUND).tell(values, edits)


def project(x: Tensor) -> Tensor:
    return torch.softmax(x @ WEIGHT * 0.5, -1) + BIAS


def test_equal_graphs_have_nothing_to_tell() -> None:
    assert find(project, project) is None


@pytest.mark.parametrize(
    ("wrong", "way", "right", "found"),
    [
        (lambda x: torch.softmax(x @ WEIGHT * 0.25, -1) + BIAS, "number", ("mul", "0.5"), ("mul", "0.25")),
        (lambda x: torch.softmax(x @ WEIGHT / 0.25, -1) + BIAS, "function", ("mul", "0.5"), ("div", "0.25")),
        (lambda x: torch.softmax(x @ WEIGHT * 0.5, -1), "left-out", ("add", ""), None),
        (lambda x: torch.softmax((x @ WEIGHT).tanh() * 0.5, -1) + BIAS, "added", None, ("tanh", "")),
        (
            lambda x: torch.softmax(x @ WEIGHT * 0.5, -2) + BIAS,
            "number",
            ("_softmax", "-1"),
            ("_softmax", "-2"),
        ),
        (lambda x: torch.softmax(x @ WEIGHT * 0.5, -1) * BIAS, "function", ("add", ""), ("mul", "")),
        (lambda x: x @ WEIGHT * 0.5 + BIAS, "left-out", ("_softmax", "-1"), None),
        # Elements in another order are the same values: the step that brings them together is named.
        (lambda x: torch.softmax(x @ WEIGHT * 0.5, -1) + BIAS.flip(0), "order", ("add", ""), ("add", "")),
    ],
    ids=["number", "function", "left-out", "added", "dim", "other-function", "softmax", "flip"],
)
def test_one_step_is_named(
    wrong: Compute, way: str, right: tuple[str, str] | None, found: tuple[str, str] | None
) -> None:
    (step,) = find(project, wrong) or ()
    assert step.way == way
    for term, wanted in ((step.right, right), (step.wrong, found)):
        if wanted is not None:
            assert term is not None
            assert (term.operator, ", ".join(term.options)) == wanted
    if step.wrong is not None:
        assert step.wrong.line.startswith("test_graph.py:")


def test_another_tensor_is_named_by_what_one_device_calls_it() -> None:
    def right(x: Tensor) -> Tensor:
        return (x @ WEIGHT) * torch.sigmoid(x @ OTHER)

    def wrong(x: Tensor) -> Tensor:
        return (x @ OTHER) * torch.sigmoid(x @ OTHER)

    (step,) = find(right, wrong) or ()
    assert step.way == "operand"
    assert step.right is not None
    assert step.wrong is not None
    assert (step.right.operator, step.wrong.operator) == ("", "")
    assert (step.right.name, step.wrong.name) == ("weight", "other")


def test_two_steps_are_named_together() -> None:
    steps = find(project, lambda x: torch.softmax((x @ WEIGHT).clamp(max=0.1) * 0.5, -1) + BIAS * 2.0)
    assert steps is not None
    assert {(step.way, step.wrong and step.wrong.operator) for step in steps} == {
        ("added", "clamp"),
        ("added", "mul"),
    }


def test_several_operators_in_place_of_one_are_named_whole() -> None:
    def wrong(x: Tensor) -> Tensor:
        scores = torch.sigmoid(x @ WEIGHT * 0.5)
        return scores / scores.sum(-1, keepdim=True) + BIAS

    (step,) = find(project, wrong) or ()
    assert step.way == "other"
    assert step.right is not None
    assert step.wrong is not None
    assert (step.right.operator, step.wrong.operator) == ("_softmax", "div")


def test_other_computations_are_not_told_as_a_few_steps() -> None:
    def wrong(x: Tensor) -> Tensor:
        for number in range(9):
            x = torch.cos(x * (1.0 + number)) - torch.sin(x).cumsum(-1)
        return x @ WEIGHT

    assert find(project, wrong) is None


def test_partial_sums_are_not_said_to_bring_other_elements_together() -> None:
    graphs = [
        record(lambda x, part=part: x @ WEIGHT[part].clone(), INPUT[:, part].clone())  # type: ignore[misc]
        for part in (slice(0, 3), slice(3, 6))
    ]
    assert tell(record(lambda x: x @ WEIGHT, INPUT), graphs) is None


def test_what_is_written_in_place_is_seen_and_named() -> None:
    def right(x: Tensor) -> Tensor:
        y = x @ WEIGHT
        y[:, :4].mul_(0.5)
        return y.tanh()

    def wrong(x: Tensor) -> Tensor:
        y = x @ WEIGHT
        y[:, :4].mul_(0.25)
        return y.tanh()

    (step,) = find(right, wrong) or ()
    assert step.way == "number"
    assert step.wrong is not None
    assert (step.wrong.operator, step.wrong.options) == ("mul_", ("0.25",))


def test_memory_that_is_used_again_holds_another_tensor() -> None:
    buffer = torch.empty(6, 8, dtype=torch.float64)

    def gather(x: Tensor) -> Tensor:
        torch.mul(WEIGHT, 1.0, out=buffer)
        first = x @ buffer
        torch.mul(OTHER, 1.0, out=buffer)
        return first * (x @ buffer)

    (step,) = find(lambda x: (x @ WEIGHT) * (x @ OTHER), lambda x: gather(x) * 2.0) or ()
    assert (step.way, step.wrong and step.wrong.operator) == ("added", "mul")


def test_a_cast_that_rounds_is_a_step_and_others_are_none() -> None:
    (step,) = find(project, lambda x: project(x.bfloat16().double())) or ()
    assert (step.way, step.wrong and step.wrong.operator) == ("added", "_to_copy")
    wide = find(project, lambda x: project(x.to(torch.float64, copy=True)) * 3.0) or ()
    assert [step.wrong and step.wrong.operator for step in wide] == ["mul"]


def test_places_in_what_was_sorted_are_not_equal_because_they_are_all_places() -> None:
    def right(x: Tensor) -> Tensor:
        return (x @ WEIGHT).sort(-1).indices.double() @ WEIGHT.T

    def wrong(x: Tensor) -> Tensor:
        return (x @ WEIGHT * x[:, :1]).sort(-1).indices.double() @ WEIGHT.T

    (step,) = find(right, wrong) or ()
    assert (step.way, step.wrong and step.wrong.operator) == ("added", "mul")


def test_backward_steps_are_those_of_custom_functions_too() -> None:
    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def, override]
            ctx.save_for_backward(x)
            return torch.nn.functional.silu(x)

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
            (x,) = ctx.saved_tensors
            return gradient * torch.sigmoid(x)

    def differentiate(function: Compute) -> Compute:
        def compute(x: Tensor) -> Tensor:
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad((function(leaf @ WEIGHT) * BIAS).sum(), leaf)
            return found

        return compute

    found = find(differentiate(torch.nn.functional.silu), differentiate(Silu.apply)) or ()
    (step,) = found
    assert step.right is not None
    assert step.wrong is not None
    assert (step.right.operator, step.wrong.operator) == ("silu_backward", "mul")
    assert step.right.line == ""
    assert step.wrong.line.startswith("test_graph.py:")


def test_the_first_step_is_found_where_ranks_go_on_otherwise() -> None:
    def right(x: Tensor) -> Tensor:
        return torch.softmax((x * 2.0 + 1.0) @ WEIGHT, -1)

    def other(x: Tensor, factor: float) -> Tensor:
        shifted = 1.0 + x * factor
        parts = [torch.exp(shifted @ columns) for columns in WEIGHT.split(2, 1)]
        return torch.cat([part / sum(each.sum(-1, keepdim=True) for each in parts) for part in parts], -1)

    def look(factor: float) -> list[tuple[str, str]] | None:
        one = OneDevice(record(right, INPUT))
        graphs = [record(lambda x: other(x, factor), rows.clone()) for rows in INPUT.chunk(2)]
        values = Values(one, Ranks(range(2), graphs), BOUND)
        found = find_first_step(values, one.graph.ends[END], 0)
        return None if found is None else [(each.way, one.node(each.right[0]).operator) for each in found]

    assert look(3.0) == [("number", "mul")]
    assert look(2.0) is None


def test_what_has_no_name_on_both_sides_is_not_told() -> None:
    step = Term(operator="gt", args=(Term(), Term()), line="a.py:1")
    assert _says_nothing(OtherStep(way="other", right=step, wrong=step.model_copy(update={"line": "b.py:2"})))
    assert not _says_nothing(OtherStep(way="order", right=step, wrong=step))
    assert _says_nothing(OtherStep(way="operand", right=step, wrong=step))
    named = step.model_copy(update={"args": (Term(name="weight"), Term())})
    assert not _says_nothing(OtherStep(way="operand", right=step, wrong=named))
    # A layout divides experts: their rows are put together of fewer parts.
    parts = [Term(operator="cat", args=(Term(name="w"),) * count) for count in (8, 4)]
    assert _says_nothing(OtherStep(way="other", right=parts[0], wrong=parts[1]))
    assert not _says_nothing(OtherStep(way="other", right=parts[0], wrong=step))


def test_tensors_in_each_others_places_are_not_told() -> None:
    one, two = Term(name="q.weight"), Term(name="k.weight")
    there, back = (
        OtherStep(way="operand", right=one, wrong=two),
        OtherStep(way="operand", right=two, wrong=one),
    )
    assert _exchanges((there, back))
    assert not _exchanges((there, OtherStep(way="added", wrong=one)))


def test_too_long_a_step_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeverify.diagnose.graph.record._MOST_NODES", 3)
    assert record(project, INPUT).nodes == []


EXPERTS = torch.sin(torch.arange(4 * 6 * 6, dtype=torch.float64) * 0.7).reshape(4, 6, 6)
COUNTS = (3, 0, 1, 4)
Apply = Callable[[Tensor, Tensor], Tensor]


def run_experts(apply: Apply, experts: slice = slice(0, 4)) -> Graph:
    """Record a layer of experts, of which a rank has some, with the rows of these; one expert has no row."""
    begin, counts = sum(COUNTS[: experts.start]), COUNTS[experts]
    rows = INPUT[begin : begin + sum(counts)].clone()
    weights = EXPERTS[experts].clone()

    def compute(x: Tensor) -> Tensor:
        parts = zip(x.split(list(counts)), weights.unbind(), strict=True)
        made = torch.cat([apply(part, weight) for part, weight in parts])
        return made.index_select(0, torch.arange(len(made)).flip(0)) * 2.0

    return record_named(compute, rows, {weights.data_ptr(): "experts"})


def record_named(compute: Compute, values: Tensor, names: dict[int, str]) -> Graph:
    mode = GraphMode(names)
    with mode:
        output = compute(values)
    mode.note_end(END, output)
    return mode.graph


def test_steps_of_experts_are_compared_though_ranks_have_some_of_them() -> None:
    def right(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.silu(x @ weight)

    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.silu((x @ weight).clamp(max=0.1))

    ranks = [slice(0, 2), slice(2, 4)]
    (step,) = tell(run_experts(right), [run_experts(wrong, each) for each in ranks]) or ()
    assert (step.way, step.wrong and step.wrong.operator, step.ranks) == ("added", "clamp", ())
    # One rank alone does so, and the other does not.
    graphs = [run_experts(right, ranks[0]), run_experts(wrong, ranks[1])]
    (step,) = tell(run_experts(right), graphs) or ()
    assert (step.way, step.wrong and step.wrong.operator, step.ranks) == ("added", "clamp", (1,))
    assert tell(run_experts(right), [run_experts(right, each) for each in ranks]) is None


def test_what_some_ranks_leave_out_or_count_otherwise_is_said_of_them() -> None:
    rows = INPUT.chunk(2)
    golden = record(project, INPUT)
    graphs = [
        record(project, rows[0].clone()),
        record(lambda x: torch.softmax(x @ WEIGHT * 0.5, -1), rows[1].clone()),
    ]
    (step,) = tell(golden, graphs) or ()
    assert (step.way, step.right and step.right.operator, step.ranks) == ("left-out", "add", (1,))
    graphs[1] = record(lambda x: torch.softmax(x @ WEIGHT * 0.25, -1) + BIAS, rows[1].clone())
    (step,) = tell(golden, graphs) or ()
    assert (step.way, step.wrong and step.wrong.options, step.ranks) == ("number", ("0.25",), (1,))


def test_rows_that_are_taken_by_other_indices_are_said_to_be() -> None:
    def take(indices: Tensor) -> Compute:
        return lambda x: (x @ WEIGHT).index_select(0, indices).tanh()

    def find_index(indices: list[int]) -> tuple[OtherStep, ...] | None:
        graphs = [record(take(torch.tensor(indices)), rows.clone()) for rows in INPUT.chunk(2)]
        return tell(record(take(torch.arange(8).flip(0)), INPUT), graphs)

    assert find_index([2, 3, 0, 1]) is None  # each rank has an order of its own
    (step,) = find_index([0, 0, 1, 2]) or ()
    assert (step.way, step.wrong and step.wrong.operator) == ("index", "index_select")


def test_gradients_alone_may_be_those_of_a_scaled_loss() -> None:
    golden = record(lambda x: (x @ WEIGHT).tanh(), INPUT)
    graphs = [record(lambda x: (x * 2.0 @ WEIGHT).tanh(), rows.clone()) for rows in INPUT.chunk(2)]
    scaled = [Graph(each.nodes, each.ends, 2.0) for each in graphs]
    (step,) = tell(golden, scaled) or ()
    assert (step.way, step.wrong and step.wrong.options) == ("added", ("2",))


TOTAL = ("forward", "lm", "loss", "0", 0)


def record_total(compute: Compute, rows: Tensor, num_micro_batches: int = 1) -> Graph:
    """Record a sum over the tokens of a rank, which it makes micro-batch by micro-batch and adds up."""
    mode = GraphMode(NAMES)
    with mode:
        parts = [compute(part) for part in rows.chunk(num_micro_batches)]
        total = sum(parts[1:], parts[0])
    mode.note_total(TOTAL, total)
    return mode.graph


def tell_total(right: Compute, wrong: Compute, num_micro_batches: int = 1) -> tuple[OtherStep, ...] | None:
    graphs = [record_total(wrong, rows.clone(), num_micro_batches) for rows in INPUT.chunk(2)]
    found = Graphs(record_total(right, INPUT), graphs, BOUND).explain_total(TOTAL[:4])
    return None if found is None else found.steps


def mean_loss(x: Tensor) -> Tensor:
    return (x @ WEIGHT).square().sum() / 48.0


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "way", "operator"),
    [
        (lambda x: (x @ WEIGHT).square().tanh().sum() / 48.0, "added", "tanh"),
        (lambda x: (x @ WEIGHT).square().sum() / 24.0, "number", "div"),
        (lambda x: (x @ WEIGHT).abs().sum() / 48.0, "function", "abs"),
    ],
    ids=["step", "divisor", "function"],
)
def test_a_loss_of_which_ranks_have_parts_is_compared_by_its_steps(
    wrong: Compute, way: str, operator: str, num_micro_batches: int
) -> None:
    (step,) = tell_total(mean_loss, wrong, num_micro_batches) or ()
    assert (step.way, step.wrong and step.wrong.operator) == (way, operator)
    assert tell_total(mean_loss, mean_loss, num_micro_batches) is None


def test_gradients_of_weights_are_compared_by_their_steps() -> None:
    def right(x: Tensor) -> Tensor:
        return x.T @ (x @ WEIGHT)

    (step,) = tell_total(right, lambda x: x.clamp(min=0.0).T @ (x @ WEIGHT), 2) or ()
    assert (step.way, step.wrong and step.wrong.operator) == ("added", "clamp")
    assert tell_total(right, lambda x: x.T @ (x @ WEIGHT), 2) is None


def test_elements_that_lie_otherwise_are_one_mistake_whatever_is_made_of_them() -> None:
    def compute(x: Tensor) -> Tensor:
        rows = x @ WEIGHT
        return (rows * BIAS).tanh() * rows.exp() * (rows * BIAS.square()) * (rows + BIAS)

    def turned(x: Tensor) -> Tensor:
        rows = (x @ WEIGHT).flip(-1)
        return (rows * BIAS).tanh() * rows.exp() * (rows * BIAS.square()) * (rows + BIAS)

    (step,) = find(compute, turned) or ()
    assert (step.way, step.right and step.right.operator) == ("order", "mul")


def test_parameters_of_another_module_are_one_mistake() -> None:
    names = ("up.weight", "up.scale", "up.bias", "gate.weight", "down.weight")
    first, second = (
        {
            f"layers.{layer}.{name}": WEIGHT * (number + 1.3 + 0.37 * layer)
            for number, name in enumerate(names)
        }
        for layer in (0, 1)
    )
    known = {each.data_ptr(): name for name, each in (first | second).items()}

    def apply(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        for number, weight in enumerate(layer.values()):
            x = torch.tanh(x @ weight) @ BACK * (number + 0.9)
        return x

    def compute(x: Tensor, other: dict[str, Tensor]) -> Tensor:
        return apply(apply(x, first), other)

    golden = record_named(lambda x: compute(x, second), INPUT, known)
    graphs = [record_named(lambda x: compute(x, first), rows.clone(), known) for rows in INPUT.chunk(2)]
    (step,) = tell(golden, graphs) or ()
    assert step.right is not None
    assert step.wrong is not None
    assert (step.way, step.right.module, step.wrong.module) == ("operand", "layers.1", "layers.0")


def test_numbers_of_python_have_a_line_and_are_told_with_their_factor() -> None:
    def right(x: Tensor) -> Tensor:
        return torch.cos((x @ WEIGHT) * torch.pow(10.0, BIAS))

    def wrong(x: Tensor) -> Tensor:
        numbers = [3.0 * 10.0**each for each in BIAS.tolist()]
        return torch.cos((x @ WEIGHT) * torch.tensor(numbers, dtype=torch.float64))

    (step,) = find(right, wrong) or ()
    assert (step.way, step.wrong and step.wrong.operator) == ("other", "tensor")
    assert step.factor == pytest.approx(3.0)
    assert step.wrong is not None
    assert step.wrong.line.startswith("test_graph.py:")
