"""Sentences on the first wrong operation: its effect, its place, the right operation, and the proof."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from culprit_sentences import BY_AUTOGRAD, CASES, HERE, MADE, OTHER, SAME_OPERATOR, THERE, WEIGHT, X_B

from moeverify.report.brief import list_lines
from moeverify.report.words.culprit import (
    describe_culprit,
    describe_culprit_place,
    list_culprit,
    list_source,
)
from moeverify.report.words.origin import list_origins
from moeverify.results.culprit import (
    CodeLine,
    Culprit,
    Mechanism,
    Operation,
    Origin,
    OriginKind,
    SourceValue,
    SumPart,
)

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
    fields, rows = CASES[mechanism]
    culprit = make(mechanism, **fields)
    listed = list_culprit(culprit)
    assert [row for row in listed if row in rows] == rows
    assert listed[0][0] == "cause"
    text = describe_culprit(culprit)
    assert all(row_text[1:] in text for label, row_text in rows if label not in ("via", "lines"))
    assert "`x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1" in text
    assert not PRIVATE.search(text.replace("`", "")), PRIVATE.search(text)
    assert not text.endswith(".")


@pytest.mark.parametrize(
    ("mechanism", "cause"),
    [
        ("operand", "first wrong input: in {}; {}, so the mistake is where the input is made"),
        ("number", "first wrong number: in {}; {}, so the mistake is where the number is made"),
        ("scale", "first wrong operation: {}; its inputs match, and {}"),
    ],
)
def test_a_line_of_one_device_is_not_named_as_the_cause(mechanism: Mechanism, cause: str) -> None:
    culprit = make(mechanism, taken=WEIGHT, right=MADE, there=THERE.model_copy(update={"line": HERE.line}))
    operation = "`x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1"
    assert list_culprit(culprit)[0] == ("cause", cause.format(operation, "one device executes this line too"))
    assert not culprit.names_cause


@pytest.mark.parametrize(
    ("factor", "axes", "is_named"),
    [
        (2.0, (), True),
        (0.125**0.5, (), True),
        (0.999, (), True),
        (0.99217354, (), False),
        (0.99217354, ("tp",), True),
    ],
)
def test_a_factor_that_nothing_explains_is_a_measurement(
    factor: float, axes: tuple[str, ...], is_named: bool
) -> None:
    culprit = make("scale", factor=factor, axes=axes)
    assert culprit.names_cause is is_named
    assert list_culprit(culprit)[0][1].endswith("ranks 0, 1; its inputs match")


def test_an_operand_without_a_counterpart_was_made_wrongly_before() -> None:
    culprit = make("operand", right=MADE, there=THERE)
    assert "ranks 0, 1; the mistake is where the input is made" in list_culprit(culprit)[0][1]
    assert ("proof", "executed with the right input, loss/total equals one device (1e-15)") in list_culprit(
        culprit
    )
    assert not culprit.names_cause
    assert make("operand", taken=WEIGHT, right=MADE, there=SAME_OPERATOR).names_cause
    assert not make("operand", taken=WEIGHT, right=MADE, there=THERE).names_cause  # of another operator


@pytest.mark.parametrize(
    ("later", "rows"),
    [
        (
            (THERE, OTHER),
            [
                ("cause", "weight/w is only head.weight"),
                ("reference", f"adds another part to it: {X_B}, then `a @ w` (mm), mine/ffn.py:9"),
            ],
        ),
        (
            (OTHER,),
            [("cause", "weight/w is head.weight"), ("reference", "followed by `a @ w` (mm), mine/ffn.py:9")],
        ),
    ],
)
def test_a_value_to_which_one_device_does_more_is_named_with_what_follows(
    later: tuple[Operation, ...], rows: list[tuple[str, str]]
) -> None:
    culprit = make("moved", results=("weight/w",), taken=WEIGHT, moves_there=later)
    assert list_culprit(culprit)[:2] == rows


def test_an_operation_that_takes_an_earlier_value_says_so() -> None:
    assert ("here", "it takes head.weight, an earlier one") in list_culprit(make("removed", taken=WEIGHT))


SUMS = (
    SumPart(ranks=(0, 1), source=1, weight=0.0, rows=(2, 7)),
    SumPart(ranks=(2,), source=0, weight=1.0, rows=(3,), source_rows=(4,)),
    SumPart(ranks=(2,), source=1, weight=0.5, rows=(3,)),
)


@pytest.mark.parametrize(
    ("mechanism", "fields", "row"),
    [
        (
            "reduction",
            {"results": ("gradient/w",), "sums": SUMS},
            (
                "cause",
                "gradient/w is a wrong sum of the ranks' parts, which are right: ranks 0, 1, rows 2, 7: without the "
                "part of rank 1; rank 2, row 3: with the part of rank 0 for row 4, with 0.5 times the part of rank 1",
            ),
        ),
        (
            "removed",
            {"sums": SUMS[:1]},
            ("here", "the ranks' parts add up wrongly: ranks 0, 1, rows 2, 7: without the part of rank 1"),
        ),
        (
            "operand",
            {"operand": 1, "taken": WEIGHT.model_copy(update={"rows": (0,)}), "right": WEIGHT},
            ("here", "input 2 is row 0 of head.weight"),
        ),
        (
            "moved",
            {"results": ("weight/w",), "taken": WEIGHT, "copy_of": "weight/v"},
            ("cause", "weight/w is a copy of weight/v: it has the values of head.weight"),
        ),
    ],
)
def test_what_is_known_of_a_relation_is_told(
    mechanism: Mechanism, fields: dict[str, Any], row: tuple[str, str]
) -> None:
    assert row in list_culprit(make(mechanism, **fields))


def test_lines_to_look_at_are_named_with_their_callers() -> None:
    origins = (
        {"kind": "alone", "line": THERE.line, "caller": OTHER.line},
        {"kind": "missing", "line": THERE.line, "caller": OTHER.line, "outer": (HERE.line,)},
        {"kind": "cut", "line": HERE.line},
    )
    assert list_origins(make("place", origins=origins).origins) == [
        "`x + b`, one/ffn.py:7 in forward, called from mine/ffn.py:9: "
        "right results of this kind do not pass this line, and this one does",
        "`x + b`, one/ffn.py:7 in forward, called from mine/ffn.py:9, mine/ffn.py:12 in forward: "
        "right results of this kind pass this call, and this one does not",
        "`x * 0.9`, mine/ffn.py:12 in forward: passes no gradient, unlike the same place on one device",
    ]


def test_a_copy_of_a_sum_that_is_not_needed_names_its_tensors() -> None:
    copy = HERE.model_copy(update={"operator": "copy_"})
    culprit = make("removed", here=copy, axes=("tp",), results=("gradient/a", "gradient/b"))
    assert ("here", "writes gradient/a and 1 more tensor, reduced over tp") in list_culprit(culprit)


@pytest.mark.parametrize(("factor", "number"), [(1.0011349941799272, "1.001135"), (0.5, "exactly 0.5")])
def test_a_factor_that_is_only_measured_has_more_digits(factor: float, number: str) -> None:
    rows = list_culprit(make("scale", factor=factor))
    assert ("here", f"its result is {number} times that of one device") in rows


def test_a_sum_of_whole_values_names_the_line_that_makes_them() -> None:
    rows = list_culprit(make("scale", factor=2.0, axes=("tp",), made=THERE))
    assert [text for label, text in rows if label == "here"] == [
        "its result is exactly 2 (tp) times that of one device",
        f"each rank adds the whole value, made by {X_B}",
    ]


def test_parts_that_a_step_takes_are_named_in_the_headline() -> None:
    culprit = make("total", axes=("tp",), taken=WEIGHT, results=("gradient/a",))
    title = "gradient/a not reduced over tp: `x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1, takes"
    assert list_culprit(culprit)[0] == ("cause", f"{title} each rank's part")


def test_every_origin_has_words() -> None:
    for kind in get_args(OriginKind):
        (text,) = list_origins(make("place", origins=({"kind": kind, "line": HERE.line},)).origins)
        assert text.startswith("`x * 0.9`, mine/ffn.py:12 in forward: ")
        assert not PRIVATE.search(text.replace("`", ""))


def test_every_mechanism_has_words() -> None:
    assert set(CASES) == set(get_args(Mechanism))


def test_an_operation_of_autograd_is_named_by_its_module() -> None:
    text = describe_culprit(make("removed", here=BY_AUTOGRAD))
    assert text.startswith(
        "first wrong operation: sum, called by autograd in head, ranks 0, 1; one device does not do this"
    )


def test_a_derivative_has_the_line_that_it_is_the_derivative_of() -> None:
    here = HERE.model_copy(update={"is_derivative": True, "phase": "backward"})
    text = describe_culprit(make("removed", here=here))
    assert "gradient of `x * 0.9` (mul), mine/ffn.py:12 in forward" in text


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "Executed with that change, loss/total equals one device (1e-15)"),
        (
            {"repaired": tuple("abcde"), "residual": None},
            "Executed with that change, a, b, c, 2 more results equal one device",
        ),
        ({"repaired": ()}, "Executed with that change, the next results equal one device"),
        ({"proved": False}, "the mistake is between right inputs and the first wrong result"),
    ],
)
def test_a_proof_names_what_it_makes_right(fields: dict[str, Any], end: str) -> None:
    assert describe_culprit(make("operator", there=THERE, **fields)).endswith(end)


def test_a_result_that_is_known_is_said_to_be_so_only_where_it_is_named() -> None:
    text = describe_culprit(make("scale", factor=0.5))
    assert text.startswith("first wrong operation: `x * 0.9` (mul)")
    assert "its result is exactly 0.5 times that of one device" in text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (None, "a value without a counterpart on one device"),
        (WEIGHT, "head.weight"),
        (WEIGHT.model_copy(update={"scale": 2.0}), "2 times head.weight"),
        (
            WEIGHT.model_copy(update={"over": ("tp", "micro-batches")}),
            "a part, over tp and micro-batches, of the sum head.weight",
        ),
        (
            SourceValue(label="head.weight", operation=Operation(operator="add_", phase="step", step=1)),
            "head.weight after add_ of step 1",
        ),
        (
            SourceValue(operation=THERE),
            "the result of `x + b` (add), one/ffn.py:7 in forward, before the first step",
        ),
    ],
)
def test_a_source_is_a_name_or_what_has_made_it(source: SourceValue | None, name: str) -> None:
    assert f"input 1 is {name}" in describe_culprit(make("operand", operand=0, taken=source, right=WEIGHT))


def test_a_place_is_module_phase_step_and_callers() -> None:
    assert describe_culprit_place(make("removed")) == (
        "module layers.0.ffn; forward pass of step 2; called from mine/model.py:30 in forward"
    )
    assert describe_culprit_place(make("removed", here=BY_AUTOGRAD)) == "module head; backward pass of step 0"
    before = HERE.model_copy(update={"step": -1, "module": "", "callers": ()})
    assert describe_culprit_place(make("removed", here=before)) == "before the first step"


def test_the_lines_around_are_shown_with_those_of_one_device_without_their_common_indentation() -> None:
    own = ["mine/ffn.py:11   # scaled", "mine/ffn.py:12 > y = x * 0.9"]
    assert list_source(make("removed")) == own
    assert list_source(make("operator", there=HERE)) == own, "the same lines are shown once"
    for mechanism, title in (("operator", "reference: "), ("race", "collective: ")):
        assert list_source(make(mechanism, there=THERE)) == [*own, f"{title}one/ffn.py:7 > y = x + b"]  # type: ignore[arg-type]
    made = OTHER.model_copy(update={"line": THERE.line})
    assert list_source(make("operand", made=made)) == [*own, "input: one/ffn.py:7 > y = x + b"]
    assert list_source(make("removed", here=BY_AUTOGRAD)) == []
    caller = CodeLine(file="mine/model.py", line=30, lines=((30, "    for ffn in self.ffns:"),))
    called = make("place", here=HERE.model_copy(update={"callers": (caller,)}))
    assert list_source(called) == [*own, "caller: mine/model.py:30 > for ffn in self.ffns:"]


def own(kind: OriginKind, **fields: Any) -> Origin:
    return Origin(kind=kind, line=OTHER.line, **fields)


SHARED = THERE.model_copy(update={"line": HERE.line})
OF_RANKS = own("definition", here="8")
IN_BRANCH = own("definition", here="8", is_branch=True)
PASSED_ON = own("definition", here="8", there="4")


@pytest.mark.parametrize(
    ("mechanism", "origins", "is_named"),
    [
        ("number", (OF_RANKS,), True),
        ("number", (OF_RANKS, PASSED_ON), True),
        ("number", (PASSED_ON,), False),
        ("number", (OF_RANKS, own("branch")), False),
        ("operand", (OF_RANKS,), False),  # sizes and places of a layout
        ("operand", (own("extra"),), True),
        ("operand", (own("extra"), PASSED_ON), False),
        ("operand", (own("branch"),), True),
        ("operand", (own("value"),), False),
        ("removed", (own("branch"),), False),
    ],
)
def test_the_only_line_that_one_device_does_not_execute_is_the_cause(
    mechanism: Mechanism, origins: tuple[Origin, ...], is_named: bool
) -> None:
    culprit = make(mechanism, there=SHARED, taken=WEIGHT, right=MADE, origins=origins)
    assert (culprit.own_line == origins[0]) is is_named
    assert culprit.names_cause is is_named
    headline = "first wrong line: `a @ w`, mine/ffn.py:9; one device does not execute it"
    assert list_culprit(culprit)[0][1].startswith(headline) is is_named
    assert not make(mechanism, there=SAME_OPERATOR, taken=WEIGHT, right=MADE, origins=origins).own_line
    assert not make(mechanism, there=SHARED, taken=WEIGHT, origins=origins, proved=False).names_cause


def test_the_cause_on_a_line_of_ranks_says_where_its_value_enters() -> None:
    culprit = make("number", there=SHARED, numbers=(("8", "4"),), origins=(OF_RANKS,))
    assert list_culprit(culprit) == [
        ("cause", "first wrong line: `a @ w`, mine/ffn.py:9; one device does not execute it; it gives 8"),
        ("enters", "`x * 0.9` (mul), mine/ffn.py:12 in forward, ranks 0, 1"),
        ("here", "with 8"),
        ("reference", "with 4"),
        ("proof", "executed with the right number, loss/total equals one device (1e-15)"),
    ]
    assert list_lines(culprit)[0] == "mine/ffn.py:9: a @ w"


@pytest.mark.parametrize(
    ("origins", "fields", "is_lone"),
    [
        ((own("branch"), own("value")), {}, True),
        ((own("parallel"), own("value")), {}, False),  # a right layout has such lines, too
        ((own("branch"), own("parallel")), {}, True),
        ((own("branch"), own("extra")), {}, False),
        ((own("value"), own("branch")), {}, False),
        ((own("extra"),), {}, False),  # a layout may need the operator
        ((own("branch"),), {"taken": WEIGHT}, True),
        ((IN_BRANCH, PASSED_ON), {}, True),
        ((OF_RANKS, PASSED_ON), {}, False),  # ranks alone execute its whole function
        ((PASSED_ON,), {}, False),
        ((own("cut", is_branch=True),), {}, True),
        ((own("missing", is_branch=True),), {}, False),
        ((own("branch"), OF_RANKS), {}, True),
        ((own("branch"), own("skipped")), {}, True),
        ((own("skipped"), own("skipped")), {}, False),
    ],
)
def test_the_only_line_of_ranks_before_a_place_comes_first_and_claims_no_cause(
    origins: tuple[Origin, ...], fields: dict[str, Any], is_lone: bool
) -> None:
    culprit = make("place", proved=False, origins=origins, **fields)
    assert (culprit.lone_line is not None, culprit.own_line, culprit.names_cause) == (is_lone, None, False)
    headline = "only line of ranks alone before the first wrong result: `a @ w`, mine/ffn.py:9"
    assert list_culprit(culprit)[0][1].startswith(headline) is is_lone


@pytest.mark.parametrize(("function", "is_named"), [("forward", True), ("another", False)])
def test_lines_that_ranks_leave_out_lead_if_their_function_calls_the_operation(
    function: str, is_named: bool
) -> None:
    line = OTHER.line.model_copy(update={"function": function})
    skipped = Origin(kind="skipped", line=line)
    rows = list_culprit(make("place", proved=False, origins=(skipped, own("value"))))
    headline = "only lines before the first wrong result that ranks leave out: under `a @ w`, mine/ffn.py:9"
    assert rows[0][1].startswith(headline) is is_named


def test_an_operand_of_an_earlier_step_is_told_where_only_the_place_is_known() -> None:
    culprit = make("place", proved=False, operand=1, taken=MADE.model_copy(update={"step": 1, "scale": 2.0}))
    first, second, *_ = list_culprit(culprit)
    assert first[1].endswith("ranks 0, 1; one input may be wrong")
    assert second == ("here", f"input 2 is 2 times the result of {X_B}, step 1")


def test_a_collective_leads_whose_result_nothing_uses_beside_a_value_that_is_used() -> None:
    elsewhere = Origin(kind="value", line=OTHER.line.model_copy(update={"function": "another"}))
    for beside, is_lone in ((own("extra"), True), (elsewhere, False)):
        culprit = make("place", proved=False, origins=(own("unused"), beside))
        assert (culprit.lone_line is not None) is is_lone
        assert (
            list_culprit(culprit)[0][1].startswith("nothing uses the result of a collective: `a @ w`")
            is is_lone
        )
    assert make("number", origins=(own("unused"), own("extra")), there=OTHER).lone_line is None


@pytest.mark.parametrize(
    ("here", "there", "is_named"), [("4", "2", True), ("3", "2", False), ("x", "2", False)]
)
def test_a_number_that_has_the_factor_of_a_scaled_result_is_the_cause(
    here: str, there: str, is_named: bool
) -> None:
    origin = own("definition").model_copy(update={"here": here, "there": there})
    culprit = make("scale", factor=2.0, origins=(origin,))
    headline = "first wrong number: `a @ w`, mine/ffn.py:9; it gives 4, and 2 on one device"
    assert (list_culprit(culprit)[0][1] == headline) is is_named


@pytest.mark.parametrize(("here", "is_named"), [("8", True), ("None", False)])
def test_a_definition_of_none_defines_no_number(here: str, is_named: bool) -> None:
    origins = (own("definition", here=here),)
    culprit = make("number", there=SHARED, numbers=(("8", "4"),), origins=origins)
    assert (culprit.own_line is not None) is is_named


def test_a_wrong_group_is_named_by_the_call_that_makes_it() -> None:
    made = OTHER.model_copy(update={"callers": HERE.callers})
    culprit = make("group", numbers=(("dp", "dp and cp"),), axes=("dp", "cp"), made=made)
    assert list_culprit(culprit)[:2] == [
        (
            "cause",
            "wrong process group: made by `a @ w` (mm), mine/ffn.py:9, called from mine/model.py:30 in forward",
        ),
        (
            "here",
            "over dp, first used in `x * 0.9` (mul), mine/ffn.py:12 in forward; all results of the group are right "
            "over dp and cp",
        ),
    ]
    assert list_lines(culprit)[0] == "mine/ffn.py:9: a @ w"
