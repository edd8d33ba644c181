"""Sentences on the first wrong operation: its effect, its place, the right operation, and the proof."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from moeverify.report.words.culprit import describe_culprit, describe_culprit_place, list_source
from moeverify.results.culprit import CodeLine, Culprit, Mechanism, Operation, Source

HERE = Operation(
    operator="mul",
    line=CodeLine(
        file="mine/ffn.py",
        line=12,
        function="forward",
        expression="x * 0.9",
        lines=((11, "    # scaled"), (12, "    y = x * 0.9")),
    ),
    callers=(CodeLine(file="mine/model.py", line=30, function="forward"),),
    module="layers.0.ffn",
    step=2,
)
THERE = Operation(
    operator="add",
    line=CodeLine(
        file="one/ffn.py", line=7, function="forward", expression="x + b", lines=((7, "    y = x + b"),)
    ),
)
OTHER = Operation(operator="mm", line=CodeLine(file="mine/ffn.py", line=9, expression="a @ w"))
WEIGHT = Source(label="head.weight")
MADE = Source(operation=THERE, step=2)
BY_AUTOGRAD = Operation(operator="sum", module="head", phase="backward", step=0)

CASES: dict[Mechanism, tuple[dict[str, Any], str]] = {
    "number": (
        {"numbers": (("0.9", "0.7"),), "there": THERE},
        "One device has 0.7 and not 0.9, one/ffn.py:7",
    ),
    "operator": ({"there": THERE}, "One device: add in `x + b`, one/ffn.py:7 in forward"),
    "operand": (
        {"operand": 1, "taken": WEIGHT, "right": MADE, "there": THERE, "made": OTHER, "moves": (OTHER,)},
        "Input 2, made by mm in `a @ w`, mine/ffn.py:9, is head.weight. "
        "One device takes the result of add in `x + b`, one/ffn.py:7 in forward (step 2), one/ffn.py:7",
    ),
    "total": (
        {"axes": ("tp",), "taken": Source(label="head.weight", over=("tp",))},
        "the reduction over tp comes later or never. The input is a part, over tp, of the sum that is head.weight",
    ),
    "share": ({}, "It joins parts of a sum with a value that counts once"),
    "whole": (
        {"right": WEIGHT, "there": THERE},
        "It takes a part of head.weight; one device takes all of it, one/ffn.py:7",
    ),
    "removed": ({}, "One device does not do this"),
    "returned": (
        {"results": ("layers.0.router",), "taken": WEIGHT, "right": MADE, "there": THERE},
        "layers.0.router returns the result of mul in `x * 0.9`, mine/ffn.py:12 in forward, on ranks 0, 1. "
        "One device returns the result of add in `x + b`, one/ffn.py:7 in forward (step 2)",
    ),
    "written": (
        {"made": OTHER},
        "Nothing has written these values after it. "
        "Most tensors that are right were last written by mm in `a @ w`, mine/ffn.py:9",
    ),
    "inserted": (
        {"numbers": (("mul", ""),), "right": WEIGHT},
        "On one device, its input is multiplied with head.weight before; here it is not",
    ),
    "value": ({"there": THERE, "proved": False, "between": (OTHER, HERE)}, "One device: add in `x + b`"),
    "scale": (
        {"results": ("gradient/w",), "factor": 2.0, "axes": ("tp", "dp")},
        "gradient/w is exactly 2 (tp or dp) times that of one device. First seen in the result of mul",
    ),
    "reduction": (
        {"results": ("gradient/w",), "axes": ("tp",)},
        "gradient/w is not reduced over tp: the values of these ranks add up to that of one device",
    ),
    "moved": (
        {"results": ("gradient/w",), "taken": WEIGHT},
        "gradient/w has right values in wrong places: those of head.weight",
    ),
    "race": (
        {"there": THERE},
        "It uses memory while add in `x + b`, one/ffn.py:7 in forward may still be using",
    ),
    "place": ({"proved": False, "between": (OTHER, HERE)}, "Only the place is known"),
}

PRIVATE = re.compile(
    r"\b(None|aten|edit|leaf|unseen|suspect|stretch|landmark|target|mechanism|identit\w+|taint\w*|joint)\b|_|\.\.|  "
)


def make(mechanism: Mechanism, **fields: Any) -> Culprit:
    return Culprit.model_validate(
        {
            "mechanism": mechanism,
            "proved": True,
            "here": HERE,
            "ranks": (0, 1),
            "repaired": ("loss/total",),
            "residual": 1e-15,
        }
        | fields
    )


@pytest.mark.parametrize("mechanism", CASES)
def test_a_mechanism_is_told_with_its_line(mechanism: Mechanism) -> None:
    fields, phrase = CASES[mechanism]
    text = describe_culprit(make(mechanism, **fields))
    assert phrase in text
    assert "mul in `x * 0.9`, mine/ffn.py:12 in forward, on ranks 0, 1" in text
    assert not PRIVATE.search(text.replace("`", "")), PRIVATE.search(text)
    assert not text.endswith(".")


def test_every_mechanism_has_words() -> None:
    assert set(CASES) == set(get_args(Mechanism))


def test_an_operation_of_autograd_is_named_by_its_module() -> None:
    text = describe_culprit(make("removed", here=BY_AUTOGRAD))
    assert text.startswith(
        "first wrong operation: sum, called by autograd in head, on ranks 0, 1; its inputs match"
    )


def test_a_derivative_has_the_line_that_it_is_the_derivative_of() -> None:
    here = HERE.model_copy(update={"is_derivative": True, "phase": "backward"})
    text = describe_culprit(make("removed", here=here))
    assert "mul, for the gradient of `x * 0.9`, mine/ffn.py:12 in forward" in text


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "Executed with that change, loss/total is right (1e-15)"),
        (
            {"repaired": tuple("abcde"), "residual": None},
            "Executed with that change, a, b, c, 2 more results are right",
        ),
        ({"repaired": ()}, "Executed with that change, all that follows is what one device has"),
        (
            {"proved": False, "between": (OTHER, HERE, HERE)},
            "the mistake is between right inputs and the first wrong result: "
            "mine/ffn.py:9, mine/ffn.py:12 in forward",
        ),
    ],
)
def test_a_proof_names_what_it_makes_right(fields: dict[str, Any], end: str) -> None:
    assert describe_culprit(make("operator", there=THERE, **fields)).endswith(end)


def test_a_result_that_is_known_is_said_to_be_so_only_where_it_is_named() -> None:
    text = describe_culprit(make("scale", factor=0.5))
    assert text.startswith("first wrong operation: mul in `x * 0.9`")
    assert "Its result is exactly 0.5 times that of one device" in text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (None, "a value that one device does not have"),
        (WEIGHT, "head.weight"),
        (WEIGHT.model_copy(update={"scale": 2.0}), "2 times head.weight"),
        (
            WEIGHT.model_copy(update={"over": ("tp", "micro-batches")}),
            "a part, over tp and micro-batches, of the sum",
        ),
        (
            Source(label="head.weight", operation=Operation(operator="add_", phase="step", step=1)),
            "head.weight after add_ of step 1",
        ),
        (
            Source(operation=THERE),
            "the result of add in `x + b`, one/ffn.py:7 in forward (before the first step)",
        ),
    ],
)
def test_a_source_is_a_name_or_what_has_made_it(source: Source | None, name: str) -> None:
    assert f"Input 1 is {name}" in describe_culprit(make("operand", operand=0, taken=source, right=WEIGHT))


def test_a_place_is_module_phase_step_and_callers() -> None:
    assert describe_culprit_place(make("removed")) == (
        "module layers.0.ffn; forward pass of step 2; called from mine/model.py:30 in forward"
    )
    assert describe_culprit_place(make("removed", here=BY_AUTOGRAD)) == "module head; backward pass of step 0"
    before = HERE.model_copy(update={"step": -1, "module": "", "callers": ()})
    assert describe_culprit_place(make("removed", here=before)) == "before the first step"


def test_the_lines_around_are_shown_with_those_of_one_device() -> None:
    own = ["mine/ffn.py:11       # scaled", "mine/ffn.py:12 >     y = x * 0.9"]
    assert list_source(make("removed")) == own
    assert list_source(make("operator", there=HERE)) == own, "the same lines are shown once"
    for mechanism, title in (("operator", "one device: "), ("race", "collective: ")):
        assert list_source(make(mechanism, there=THERE)) == [*own, f"{title}one/ffn.py:7 >     y = x + b"]  # type: ignore[arg-type]
    assert list_source(make("removed", here=BY_AUTOGRAD)) == []
