"""The table of ranks' operators and those of one device: counterpart, part of it, and error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from recordings import make, record_call
from torch import Tensor

from moeverify.explain import operator_lists
from moeverify.explain.operator_lists import Listed, list_operators
from moeverify.explain.operator_table import choose_bound, make_table
from moeverify.results.operator_table import Compared, Operator, OperatorTable

X, W = make(4, 6), make(6, 8, seed=1)


def compute(x: Tensor, w: Tensor, factor: float = 2.0) -> Tensor:
    """Return the output of a small layer."""
    hidden = x @ w
    scaled = hidden * factor
    return scaled.tanh().sum()


def loop(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Return a sum over operators that one line calls."""
    return torch.stack([rows[place].cosh() for place in places]).sum()


def listed(*arguments: Tensor | float) -> Listed:
    """Return the operators of `compute`."""
    x, w, *rest = arguments
    assert isinstance(x, Tensor)
    assert isinstance(w, Tensor)
    return list_operators(record_call(lambda x, w: compute(x, w, *rest), x=x, w=w), 0)


def compare(expected: Listed, *actual: Listed, seconds: float = 60.0, bound: float = 1e-8) -> OperatorTable:
    return make_table(
        [expected], actual, title="case", step=0, names=("one", "many"), seconds=seconds, bound=bound
    )


def find(table: OperatorTable, name: str, rank: int = 0) -> tuple[Operator, Compared]:
    """Return the only operator of a name with its comparison."""
    ((op, compared),) = [
        (op, each)
        for op, each in zip(table.actual[rank].operators, table.compared[rank], strict=True)
        if op.name.startswith(name)
    ]
    return op, compared


def test_an_operator_is_listed_with_its_line_its_results_and_its_inputs() -> None:
    operators = listed(X, W).operators
    names = [op.name for op in operators.operators]
    mul = operators.operators[names.index("mul.Tensor")]
    site = operators.sites[mul.sites[0]]
    assert (site.function, site.expression) == ("compute", "hidden * factor")
    assert [(each.shape, each.dtype) for each in mul.results] == [((4, 8), "float64")]
    assert mul.inputs == (names.index("mm.default"),)
    assert operators.operators[names.index("mm.default")].inputs == ("x", "w")
    assert (mul.phase, operators.left_out) == ("forward", 0)


def test_shards_match_and_the_wrong_operator_differs_with_all_that_follows() -> None:
    table = compare(listed(X, W), listed(X[:2], W), listed(X[2:], W, 2.5))
    outcomes = {(rank, name): find(table, name, rank)[1] for rank in (0, 1) for name in ("mm", "mul", "tanh")}
    assert {key: each.outcome for key, each in outcomes.items()} == {
        (0, "mm"): "match",
        (0, "mul"): "match",
        (0, "tanh"): "match",
        (1, "mm"): "match",
        (1, "mul"): "multiple",
        (1, "tanh"): "differs",
    }
    assert (outcomes[0, "mm"].place, outcomes[1, "mm"].place) == ("dim 0: 0-1 of 4", "dim 0: 2-3 of 4")
    assert outcomes[1, "mul"].factor == pytest.approx(1.25)
    expected = table.expected[0].operators
    assert [expected[outcomes[1, name].other].name for name in ("mm", "mul")] == ["mm.default", "mul.Tensor"]
    right, wrong = (2.0 * X[2:] @ W).tanh(), (2.5 * X[2:] @ W).tanh()
    assert outcomes[1, "tanh"].error == pytest.approx(float((wrong - right).norm() / right.norm()))


def test_parts_of_a_sum_over_ranks_match() -> None:
    table = compare(listed(X, W), listed(X[:, :3], W[:3]), listed(X[:, 3:], W[3:]))
    for rank in (0, 1):
        op, compared = find(table, "mm", rank)
        assert op.results[0].shape == (4, 8)
        assert (compared.outcome, compared.place) == ("match", "part of a sum over ranks 0, 1, whole")
        assert find(table, "tanh", rank)[1].outcome == "differs"


def test_of_operators_of_one_line_that_with_the_same_values_is_the_counterpart() -> None:
    rows = make(4, 3)
    both = [
        list_operators(record_call(lambda rows, places=places: loop(rows, places), rows=rows), 0)
        for places in (range(4), (2, 3))
    ]
    table = compare(*both)
    expected = [place for place, op in enumerate(table.expected[0].operators) if op.name == "cosh.default"]
    found = [
        (each.outcome, each.other)
        for op, each in zip(table.actual[0].operators, table.compared[0], strict=True)
        if op.name == "cosh.default"
    ]
    assert found == [("match", expected[2]), ("match", expected[3])]


def test_of_several_results_the_worst_is_told() -> None:
    def part(rows: Tensor, factor: float) -> Tensor:
        first, second = torch.stack([rows, rows.sin() * factor]).unbind()
        return first + second

    both = [
        list_operators(record_call(lambda rows, factor=factor: part(rows, factor), rows=X), 0)
        for factor in (1.0, 2.0)
    ]
    assert find(compare(*both), "unbind")[1].outcome == "multiple"


def test_an_operator_without_counterpart_is_alone() -> None:
    more = list_operators(record_call(lambda x, w: compute(x.exp(), w), x=X, w=W), 0)
    assert find(compare(listed(X, W), more), "exp")[1] == Compared(outcome="alone")


def test_rounding_is_allowed_of_the_narrowest_dtype() -> None:
    wide, narrow = listed(X, W), listed(X.float(), W.float())
    assert (choose_bound([wide]), choose_bound([wide, narrow])) == (1e-8, 2.0**-13)
    table = compare(wide, narrow, bound=2.0**-13)
    assert find(table, "mul")[1].outcome == "match"
    assert find(compare(wide, narrow), "mul")[1].outcome == "differs"


def test_without_time_nothing_is_compared_and_a_note_says_so() -> None:
    table = compare(listed(X, W), listed(X, W), seconds=-1.0)
    assert {each.outcome for each in table.compared[0]} == {"uncompared"}
    assert table.notes == (f"{len(table.compared[0])} operators are not compared: the time was over",)


def test_of_many_operators_the_first_are_listed_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    total = len(listed(X, W).operators.operators)
    monkeypatch.setattr(operator_lists, "MOST_OPERATORS", 2)
    table = compare(listed(X, W), listed(X, W))
    assert [len(each.operators) for each in (*table.expected, *table.actual)] == [2, 2]
    assert table.notes[0].startswith(f"{2 * (total - 2)} operators are not listed")
