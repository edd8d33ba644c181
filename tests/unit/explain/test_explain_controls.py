"""Controls of proofs: values that cancel are not blamed. Whole values in sums of parts are, with the line of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from generated import explain, read
from recordings import find_result, list_ops, make, record_call
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.culprits import Culprits
from moeverify.explain.edit import Edit
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import Changes, Joint
from moeverify.explain.program import GroupRef, Meeting, Program, Ref
from moeverify.results.culprit import Culprit

GROUPS = {"cp": [[0, 1]]}
Meet = Callable[[Tensor], Tensor]


def record_summed(function: Callable[..., Tensor], parts: list[dict[str, Tensor]]) -> list[Program]:
    """Record a function on ranks that adds up one number over them, by its last argument."""
    terms: list[Tensor] = []

    def keep(term: Tensor) -> Tensor:
        terms.append(term.clone())
        return term

    for part in parts:
        function(**part, meet=keep)
    programs = []
    for part in parts:
        total = torch.stack(terms).sum(0)
        program = record_call(
            lambda total=total, **inputs: function(**inputs, meet=lambda term: term.lerp(total, 1.0)), **part
        )
        (op,) = list_ops(program, "lerp")
        taken = next(iter(op.reads()))
        op.name, op.args = "collective.all_reduce", ([Ref(taken)],)
        op.kwargs = {"reduction": "sum", "shapes": [program.values[taken].shape]}
        op.meeting = Meeting(GroupRef("team", (0, 1)), 1)
        programs.append(program)
    return programs


def explain_summed(
    function: Callable[..., Tensor], parts: list[dict[str, Tensor]], whole: dict[str, Tensor]
) -> Culprit:
    one = record_call(lambda **inputs: function(**inputs, meet=Tensor.clone), **whole)
    explainer = Explainer(record_summed(function, parts), one, 0, (2.0, 0.5), GROUPS)
    (cause,) = explainer.explain(20.0)
    return Culprits(explainer, {"cp": 2.0}).make(cause)


def test_a_whole_value_beside_a_part_is_named_with_the_line_that_makes_it() -> None:
    def run(x: Tensor, y: Tensor, meet: Meet) -> Tensor:
        each = -x.sigmoid().log() * 0.5
        likely = y * 1.25
        return meet((each + likely).sum()).sin()

    x, shares = make(6), [make(6, seed=seed) for seed in (1, 2)]
    culprit = explain_summed(run, [{"x": x, "y": y} for y in shares], {"x": x, "y": sum(shares)})
    assert (culprit.mechanism, culprit.proved, culprit.axes) == ("share", True, ("cp",))
    assert read(culprit.here) == "each + likely"
    assert culprit.operand == 0
    assert culprit.made is not None
    assert "x.sigmoid().log()" in read(culprit.made)


def test_a_part_with_zeros_where_other_ranks_have_the_terms_is_a_part() -> None:
    x = make(6)
    is_first = torch.arange(6) < 2
    ranks = [
        record_call(torch.sin, None, input=torch.where(is_first == own, x, 0.0)) for own in (True, False)
    ]
    alignment = Alignment(Joint(ranks), record_call(torch.sin, None, input=x))
    parts = find_result(ranks[0]), find_result(ranks[1], 1)
    assert [alignment.list_parts(at) for at in parts] == [parts, parts]
    whole = Alignment(Joint([record_call(torch.sin, None, input=x)] * 2), alignment.one)
    assert [whole.list_parts(at) for at in parts] == [(), ()]


def test_a_sum_of_whole_values_shows_the_line_that_makes_them() -> None:
    def run(x: Tensor, y: Tensor, meet: Meet) -> Tensor:
        penalty = x.logsumexp(-1).square().sum()
        scaled = penalty * 0.25
        return (y * meet(scaled)).sin()

    whole = {"x": make(6, 4), "y": make(6, seed=1)}
    culprit = explain_summed(run, [whole, whole], whole)
    assert (culprit.mechanism, culprit.factor, culprit.axes) == ("scale", 2.0, ("cp",))
    assert read(culprit.made) == "x.logsumexp(-1).square().sum()"


def test_a_value_that_cancels_is_not_blamed() -> None:
    """The largest score of all cancels in a softmax. Taken first, it hides that parts are not rescaled."""

    def add_up(x: Tensor, width: int) -> Tensor:
        most, total = x.new_full((5, 1), -100.0), torch.zeros(5, 1, dtype=torch.float64)
        for part in x.split(width, -1):
            most = torch.maximum(most, part.amax(-1, keepdim=True))
            total = total + (part - most).exp().sum(-1, keepdim=True)
        return most + total.log()

    x = make(5, 8)
    rank, one = (record_call(lambda x, w=width: add_up(x, w), None, x=x) for width in (4, 8))
    explainer = Explainer([rank], one, 0, [])

    def repairs(name: str, right: Tensor) -> bool:
        op = list_ops(rank, name)[0]
        edit = Edit("operand", ((0, op.number),), Changes(values={(0, op.results[0]): right}))
        state = explainer.joint.execute(Changes())
        return explainer.proof.repairs(edit, explainer.wrong[0], [(0, op.number)], state) is not None

    most = x.amax(-1, keepdim=True)
    assert not repairs("amax", most)
    assert repairs("log", x.logsumexp(-1, keepdim=True) - most)


def test_rows_of_another_batch_are_told_by_their_indices() -> None:
    def run(x: Tensor, y: Tensor, first: int) -> Tensor:
        made = x.flatten().sin().view(4, 3)
        return y[:2] * made[first : first + 2].clone()

    inputs = {"x": make(4, 3), "y": make(4, 3, seed=1)}

    def record(first: int) -> Program:
        return record_call(lambda x, y: run(x, y, first), None, **inputs)

    culprit, *_ = explain(record(2), record(0))
    assert culprit.taken is not None
    assert culprit.right is not None
    assert (culprit.taken.rows, culprit.right.rows) == ((2, 3), (0, 1))
