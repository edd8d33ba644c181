"""The effect of a culprit on findings: its own finding, its consequences, and unaffected findings."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import build_case
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.culprit import CodeLine, Culprit, Operation, Origin
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.finding import Finding
from moeverify.results.observation import DiagnosisFailed, ReplicaSum, RightAlike
from moeverify.results.operation import Altered, Misplaced, OwnValues, Rounded, Scaled, Unreduced, Zeroed
from moeverify.results.part import WHOLE, Contribution, Part, Tokens
from moeverify.results.place import Place, Stage
from moeverify.verification.worker import culprits
from moeverify.verification.worker.culprits import (
    Found,
    Recorded,
    agree_on_step,
    choose_share,
    find_culprits,
    lead_with,
)

CPU = torch.device("cpu")
HERE = Operation(operator="mul", line=CodeLine(file="a.py", line=1))
EXPLANATION = Explanation(
    cause=Cause.LAYOUT,
    subject=Subject(quantity=Quantity.GRADIENT, tensors=("w",)),
    operation=Misplaced(expected=(4,), actual=(8,), dim=0, axes=()),
)
SURE: dict[str, Any] = {"explanation": EXPLANATION, "code": "layout"}


def find(tensor: str, kind: str = Kind.GRADIENT, check: str = CheckName.GRADIENT, **fields: Any) -> Finding:
    return Finding.model_validate(
        {"check": check, "kind": kind, "tensor": tensor, "step": 1, "rank": 0, "error": 1.0, "bound": 0.1}
        | fields
    )


def blame(*repaired: str, proved: bool = True, **fields: Any) -> Culprit:
    mechanism = "number" if proved else "place"
    return Culprit.model_validate(
        {"mechanism": mechanism, "proved": proved, "here": HERE, "repaired": repaired} | fields
    )


def lead(findings: list[Finding], *found: Any, is_complete: bool = False) -> list[Finding]:
    return lead_with(findings, Found(1, found, is_complete))


W = (Kind.GRADIENT, "w")


def test_a_proved_culprit_leads_and_what_it_repairs_follows() -> None:
    culprit = blame("gradient/w", "gradient/v")
    told = lead([find("v", unexplained=("x",)), find("u"), find("w", follows="v")], (culprit, [W]))
    assert [(each.tensor, each.follows) for each in told] == [("w", ""), ("v", "w"), ("u", "")]
    leading = culprit.model_copy(update={"leads": True})
    assert (told[0].culprit, told[0].code) == (leading, "forward")
    assert told[0].names_operation


def test_a_named_cause_leads_and_the_culprit_is_evidence_for_it() -> None:
    culprit = blame("gradient/w")
    told = lead([find("v", **SURE), find("w")], (culprit, [W]), is_complete=True)
    assert [(each.tensor, each.follows) for each in told] == [("v", ""), ("w", "")]
    assert (told[0].culprit, told[0].explanation, told[0].code) == (culprit, EXPLANATION, "layout")


MEASURED: dict[str, Any] = {
    "explanation": EXPLANATION.model_copy(
        update={"cause": Cause.SCALE, "operation": Scaled(contributions=(), loss_scale=10)}
    ),
    "code": "scale",
}


def test_a_measured_factor_ends_no_search_and_gives_way_to_a_line_that_an_execution_proves() -> None:
    measured, sure = find("v", **MEASURED), find("v", **SURE)
    assert measured.names_operation
    place = blame(proved=False), [W]
    assert [choose_share([each], 1, Found()) for each in (measured, sure)] == [0, 0]
    assert [choose_share([each], 1, Found(1, [place])) for each in (measured, sure)] == [0.25, 0]
    origin = Origin(kind="definition", line=CodeLine(file="a.py", line=7), here="3")
    proved, other = blame("gradient/w", origins=(origin,)), blame("gradient/w")
    number = other.model_copy(update={"mechanism": "number", "there": other.here})
    for each in (proved, number):
        (told, _) = lead([measured, find("w")], (each, [W]))
        assert (told.code, told.culprit) == ("forward", each.model_copy(update={"leads": True}))
    twice = Contribution(part=WHOLE, factor=Factor(value=2.0, equals=(Product(times=("tp",)),)))
    explanation = MEASURED["explanation"].model_copy(update={"operation": Scaled(contributions=(twice,))})
    (told, _) = lead([find("v", **MEASURED | {"explanation": explanation}), find("w")], (number, [W]))
    assert (told.code, told.culprit) == ("scale", number)  # a size of the layout explains the factor
    (told, _) = lead([measured, find("w")], (other, [W]))
    assert (told.code, told.culprit) == ("scale", other)
    (told, last) = lead_with([measured, find("w")], Found(1, [(other, [W]), (other, [W])], places=[place]))
    assert (told.code, told.culprit, last.culprit) == ("scale", place[0], None)


@pytest.mark.parametrize(
    ("factors", "doubts", "is_open"),
    [
        ((1.009, 0.99), 0, True),
        ((0.0, 1.0), 0, False),
        ((0.0, 2.3), 0, True),
        ((0.0,), 3, True),
    ],
)
def test_a_factor_that_nothing_explains_gives_way_to_any_line(
    factors: tuple[float, ...], doubts: int, is_open: bool
) -> None:
    """A loss divided by each rank's own count, or a factor of some of the gradients that are placed alike."""
    parts = [Part(tokens=Tokens(data_rank=rank)) for rank in range(2)]
    shares = [
        Contribution(part=part, factor=Factor(value=each)) for part, each in zip(parts, factors, strict=False)
    ]
    operation = Scaled(contributions=tuple(shares))
    explanation = MEASURED["explanation"].model_copy(update={"operation": operation})
    alike = tuple(RightAlike(axis="tp", num_right=doubts, num_alike=9) for _ in range(min(doubts, 1)))
    found = find("v", **MEASURED | {"explanation": explanation}, observations=alike)
    place = blame(proved=False, here=HERE.model_copy(update={"line": CodeLine(file="a.py", line=7)}))
    assert choose_share([found], 1, Found()) == (1.0 if is_open else 0.0)
    (told, *_) = lead([found, find("w")], (place, [W]))
    assert (told.culprit is not None and told.culprit.leads) == is_open


def test_replicas_that_differ_lead_without_a_name_of_an_operation() -> None:
    culprit = blame("gradient/w", here=HERE.model_copy(update={"step": 1}))
    apart = EXPLANATION.model_copy(
        update={"cause": Cause.REPLICAS, "operation": OwnValues(ranks=(1,), axes=("tp",))}
    )
    told = lead([find("v", code=Cause.REPLICAS, explanation=apart), find("w")], (culprit, [W]))
    assert (told[0].tensor, told[0].culprit, told[0].code) == ("v", culprit, Cause.REPLICAS)


@pytest.mark.parametrize("mechanism", ["written", "place"])
def test_an_operation_before_the_first_step_leads_replicas_that_differ(mechanism: str) -> None:
    apart = EXPLANATION.model_copy(
        update={"cause": Cause.REPLICAS, "operation": OwnValues(ranks=(1,), axes=("tp",))}
    )
    culprit = blame("gradient/w", proved=mechanism != "place", mechanism=mechanism)
    told = lead([find("v", code=Cause.REPLICAS, explanation=apart), find("w")], (culprit, [W]))
    assert (told[0].tensor, told[0].code) == ("v", Cause.REPLICAS)
    assert told[0].culprit is not None
    assert told[0].culprit.leads


@pytest.mark.parametrize(("module", "is_refuted"), [("", True), ("layers.0.mlp", False)])
def test_an_operation_outside_all_modules_refutes_a_cause_in_the_backward_pass(
    module: str, is_refuted: bool
) -> None:
    explanation = EXPLANATION.model_copy(
        update={
            "subject": Subject(quantity=Quantity.MODULE_GRADIENT, module="layers.0.mlp.gate"),
            "operation": Unreduced(axes=(), num_replicas=2, factor=Factor(value=1.0)),
        }
    )
    seen = ReplicaSum(axis="tp", num_replicas=2, factor=1.0, residual=1e-16)
    finding = find("w", explanation=explanation, code="missing-reduction", observations=(seen,))
    culprit = blame("gradient/w", proved=False, here=HERE.model_copy(update={"module": module}))
    (told,) = lead([finding], (culprit, [W]))
    assert told.culprit is not None
    assert told.culprit.leads is is_refuted
    assert (told.code, told.observations) == (
        (Cause.FORWARD, ()) if is_refuted else ("missing-reduction", (seen,))
    )


@pytest.mark.parametrize("module", ["layers.0.mlp.down", "layers.0.mlp.up"])
def test_a_part_of_a_sum_that_is_reduced_later_is_not_missing_its_reduction(module: str) -> None:
    explanation = EXPLANATION.model_copy(
        update={
            "subject": Subject(quantity=Quantity.OUTPUT, module="layers.0.mlp.down"),
            "operation": Unreduced(axes=(), num_replicas=2, factor=Factor(value=1.0)),
        }
    )
    finding = find("w", explanation=explanation, code="missing-reduction")
    culprit = blame("gradient/w", proved=False)
    found = Found(1, [(culprit, [W])], reduced=frozenset({module}))
    (told,) = lead_with([finding], found)
    assert told.culprit is not None
    assert told.culprit.leads is (module == "layers.0.mlp.down")
    assert choose_share([finding], 1, Found()) == 0
    assert choose_share([finding], 1, found) == told.culprit.leads


@pytest.mark.parametrize("reached", ["w", "v"])
def test_a_gradient_of_zeros_that_the_backward_pass_computes_is_lost_after_it(reached: str) -> None:
    explanation = EXPLANATION.model_copy(update={"cause": Cause.DETACHED, "operation": Zeroed()})
    found = Found(1, [(blame(proved=False), [W])], reached=frozenset({reached}))
    (told,) = lead_with([find("w", explanation=explanation, code="detached")], found)
    assert told.culprit is not None
    assert (told.culprit.leads, told.explanation is None) == (
        (True, True) if reached == "w" else (False, False)
    )


@pytest.mark.parametrize("code", [Cause.BACKWARD, Cause.METRIC])
def test_the_part_of_the_step_is_that_of_the_first_wrong_operation(code: Cause) -> None:
    unknown = EXPLANATION.model_copy(update={"cause": code, "operation": Altered()})
    told = lead([find("w", code=code, explanation=unknown)], (blame("gradient/w", proved=False), [W]))
    assert told[0].code == (Cause.FORWARD if code is Cause.BACKWARD else code)
    assert told[0].place == Place(module="", stage=Stage.BACKWARD)


@pytest.mark.parametrize("code", ["", Cause.NORM])
def test_a_norm_that_a_check_found_wrong_stays_the_cause(code: str) -> None:
    told = lead([find("w", code=code)], (blame("gradient/w"), [W]))
    assert told[0].code == (code or Cause.FORWARD)


def test_a_line_that_chooses_a_narrow_dtype_leads_the_module_that_rounds() -> None:
    rounded = EXPLANATION.model_copy(update={"operation": Rounded(dtype="float32"), "cause": Cause.ROUNDING})
    finding = find("w", explanation=rounded, code=Cause.ROUNDING)
    assert choose_share([finding], 1, Found()) == 0
    culprit = blame("gradient/w", mechanism="dtype", rounds_to="float32")
    told = lead([finding], (culprit, [W]))
    assert told[0].culprit == culprit.model_copy(update={"leads": True})
    assert told[0].code == Cause.ROUNDING


def test_a_race_leads_whatever_is_named() -> None:
    culprit = blame("gradient/w", mechanism="race", leads=True)
    told = lead([find("v", **SURE), find("w")], (culprit, [W]))
    assert (told[0].tensor, told[0].culprit) == ("w", culprit)


def test_where_all_is_repaired_all_follows() -> None:
    told = lead([find("w"), find("u")], (blame("gradient/w"), [W]), is_complete=True)
    assert [each.follows for each in told] == ["", "w"]


def test_later_steps_follow() -> None:
    told = lead([find("w"), find("u", step=2), find("u")], (blame("gradient/w"), [W]))
    assert [(each.step, each.follows) for each in told] == [(1, ""), (2, "w"), (1, "")]


def test_an_unproved_culprit_does_not_displace_an_explanation_that_names_an_operation() -> None:
    culprit = blame(proved=False)
    told = lead([find("w", **SURE), find("u")], (culprit, [W]))
    assert [(each.tensor, each.follows) for each in told] == [("w", ""), ("u", "")]
    assert (told[0].culprit, told[0].explanation, told[0].code) == (culprit, EXPLANATION, "layout")


def test_an_unproved_culprit_is_better_than_nothing() -> None:
    told = lead([find("w"), find("u")], (blame(proved=False), [W]))
    assert [(each.code, each.follows) for each in told] == [("forward", ""), ("", "")]


def test_an_unproved_culprit_does_not_choose_what_it_leads() -> None:
    told = lead([find("u"), find("w")], (blame(proved=False), [W]))
    assert [(each.tensor, each.culprit is not None) for each in told] == [("u", True), ("w", False)]


def test_of_several_culprits_the_first_comes_first() -> None:
    one, two = (
        blame("gradient/u", leads=True, here=HERE.model_copy(update={"step": 1})),
        blame("gradient/w", leads=True),
    )
    told = lead([find("w"), find("u"), find("v")], (one, [(Kind.GRADIENT, "u")]), (two, [W]))
    assert [(each.tensor, each.culprit, each.follows) for each in told] == [
        ("u", one, ""),
        ("w", two, ""),
        ("v", None, ""),
    ]


@pytest.mark.parametrize("check", [CheckName.DATA, CheckName.CALLS, CheckName.SHARDING])
def test_what_has_seen_the_mistake_itself_leads(check: CheckName) -> None:
    direct = find("rank 1", "", check, code="data")
    told = lead([direct, find("w")], (blame("gradient/w"), [W]))
    assert [(each.tensor, each.culprit is not None) for each in told] == [("rank 1", True), ("w", False)]


def test_what_has_seen_a_later_mistake_does_not_lead() -> None:
    later = find("rank 1", "", CheckName.DATA, code="data", step=2)
    told = lead([later, find("w")], (blame("gradient/w"), [W]))
    assert told[0].tensor == "w"


def test_checks_that_explain_themselves_do_not_follow() -> None:
    apart = find("total", Kind.GRADIENT_NORM, CheckName.CLIP)
    told = lead([apart, find("w")], (blame("gradient/w", "gradient_norm/total"), [W]), is_complete=True)
    assert [(each.tensor, each.follows) for each in told] == [("w", ""), ("total", "")]


def test_without_culprits_nothing_is_another() -> None:
    findings = [find("w", **SURE), find("rank 1", "", CheckName.DATA, code="data")]
    assert lead(findings) == findings
    assert lead([find("w", step=3)], (blame("gradient/w"), [W])) == [find("w", step=3)]


def test_a_failure_is_noted_and_leaves_the_findings() -> None:
    failure = DiagnosisFailed(message="planted", error="ValueError")
    told = lead_with([find("w", **SURE), find("u")], Found(failure=failure))
    assert [each.observations for each in told] == [(failure,), ()]
    assert (told[0].explanation, told[0].culprit) == (EXPLANATION, None)


def make_case(**recipe: Any) -> Case:
    return build_case({"name": "c", "recipe": {"model": {"preset": "tiny-gpt"}} | recipe, "layout": {}})


def test_an_error_of_the_search_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(culprits, "single_rank_world", lambda device: nullcontext())
    monkeypatch.setattr(culprits, "record_one_device", fail)
    golden: Any = None
    found = find_culprits(make_case(), golden, Recorded(1, []), CPU, 1.0)
    assert found.failure is not None
    assert (found.failure.error, found.failure.message) == ("ZeroDivisionError", "planted")
    assert found.failure.site.startswith("test_worker_culprits.py:")
    assert find_culprits(make_case(), golden, None, CPU, 1.0) == Found()


def test_an_error_of_the_search_costs_no_cause_that_was_proved_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cause, culprit = SimpleNamespace(targets=[]), blame()

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    explainer = SimpleNamespace(is_done=False, causes=[cause], explain=fail)
    found_by = SimpleNamespace(
        make=lambda _: culprit,
        trace=lambda made, _: made.model_copy(update={"ranks": (3,)}),
        make_makers=dict,
        list_reduced_modules=frozenset,
    )
    monkeypatch.setattr(culprits, "single_rank_world", lambda device: nullcontext())
    monkeypatch.setattr(culprits, "record_one_device", lambda *_: SimpleNamespace(is_complete=True))
    monkeypatch.setattr(culprits, "Explainer", lambda *_: explainer)
    monkeypatch.setattr(culprits, "Culprits", lambda *_: found_by)
    golden: Any = None
    found = find_culprits(make_case(), golden, Recorded(1, []), CPU, 1.0)
    assert [each.ranks for each, _ in found.culprits] == [(3,)]
    assert found.failure is not None
    assert found.failure.message == "planted"


@pytest.mark.parametrize("who", ["one device", "a rank"])
def test_where_values_were_left_out_nothing_is_searched(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    whole, cut = SimpleNamespace(is_complete=True), SimpleNamespace(is_complete=False)
    one, rank = (cut, whole) if who == "one device" else (whole, cut)
    programs: Any = [whole, rank]
    golden: Any = None
    monkeypatch.setattr(culprits, "single_rank_world", lambda device: nullcontext())
    monkeypatch.setattr(culprits, "record_one_device", lambda *_: one)
    assert find_culprits(make_case(), golden, Recorded(1, programs), CPU, 1.0) == Found()


@pytest.mark.parametrize(
    ("precision", "findings", "step"),
    [
        ("float64", [find("w", step=2), find("u", step=1)], 1),
        ("float64", [find("total", Kind.GRADIENT_NORM, CheckName.CLIP)], None),
        ("bfloat16", [find("w")], None),
        ("float32", [find("w")], None),
    ],
)
def test_what_is_recorded_is_the_step_where_it_began_in_float64(
    monkeypatch: pytest.MonkeyPatch, precision: str, findings: list[Finding], step: int | None
) -> None:
    monkeypatch.setattr(dist, "broadcast_object_list", lambda request: None)
    judgement: Any = SimpleNamespace(findings=findings)
    assert agree_on_step(make_case(precision=precision), judgement) == step


@pytest.mark.parametrize(
    ("breaks", "shares", "searches"),
    [
        (False, [1.0], [("search", 80)]),
        (True, [1.0], [("search", 80)]),
        (False, [0.0, 0.0], [("place", 80)]),
        (False, [0.0, 1.0], [("place", 80), ("search", 80)]),  # the place refutes the name
        (False, [0.0, 0.25], [("place", 80), ("search", 20)]),
    ],
)
def test_what_is_found_is_told_before_operators_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, breaks: bool, shares: list[float], searches: list[Any]
) -> None:
    """The first place comes before any change is tried, and then all causes; a later error keeps both."""
    place, cause = SimpleNamespace(targets=[]), SimpleNamespace(targets=[])
    heard: list[Any] = []

    class Explainer:
        is_done = True

        def __init__(self, *_: Any) -> None:
            pass

        def explain(self, seconds: float, *, proves: bool, on_place: Any) -> list[Any]:
            on_place([place])
            heard.append(("search" if proves else "place", round(seconds)))
            return [place, cause]

    class Makers:
        def __init__(self, *_: Any) -> None:
            pass

        def make(self, cause: Any) -> Culprit:
            return made[id(cause)]

        def trace(self, culprit: Culprit, cause: Any) -> Culprit:
            if breaks:
                raise ZeroDivisionError("planted")
            return culprit

        def make_makers(self) -> dict[str, Culprit]:
            return {"w": made[id(place)]}

        def list_reduced_modules(self) -> frozenset[str]:
            return frozenset({"down"})

    one = SimpleNamespace(is_complete=True, ops=[])
    made = {id(place): blame(proved=False), id(cause): blame()}
    monkeypatch.setattr(culprits, "single_rank_world", lambda device: nullcontext())
    monkeypatch.setattr(culprits, "record_one_device", lambda *_: one)
    monkeypatch.setattr(culprits, "Explainer", Explainer)
    monkeypatch.setattr(culprits, "Culprits", Makers)
    monkeypatch.setattr(culprits, "keep_operators", lambda *_: heard.append("operators") or "kept")
    golden, programs, left = None, [one], [*shares, 0.0]
    found = find_culprits(
        make_case(),
        golden,  # type: ignore[arg-type]
        Recorded(1, programs),  # type: ignore[arg-type]
        CPU,
        80.0,
        share=lambda found: left.pop(0),
        operators=tmp_path / "operators",
        tell=lambda found: heard.append([culprit for culprit, _ in found.culprits]),
    )
    first, second = made.values()
    assert [culprit for culprit, _ in found.culprits] == [first, second]
    if breaks:
        assert heard == [[first], *searches]
        assert found.failure is not None
        noted = lead_with([find("w")], replace(found, culprits=[(second, [W])]))
        assert noted[0].culprit is not None
        assert found.failure in noted[0].observations
        return
    told = [each for search in searches for each in ([first], search)]
    assert heard == [*told, [first, second], "operators"]
    assert (found.operators, found.makers) == ("kept", {"w": first})
    assert found.reduced == {"down"}


def test_a_difference_before_the_first_step_shows_the_operation_that_made_the_tensor() -> None:
    maker = blame(proved=False)
    found = Found(-1, makers={"w": maker, "v": maker})
    told = lead_with([find("w", step=0), find("u", step=-1), find("v", step=-1), find("w", step=-1)], found)
    assert [each.culprit for each in told] == [None, None, maker, None]


def test_blocks_that_no_rank_holds_follow_the_block_that_is_wrong() -> None:
    coverage = find("sink", CheckName.COVERAGE, CheckName.COVERAGE, step=-1)
    other = find("up", CheckName.COVERAGE, CheckName.COVERAGE, step=-1)
    culprit = blame("gradient/w", mechanism="block", results=("sink",))
    told = lead([coverage, other, find("w")], (culprit, [W]))
    assert [(each.tensor, each.follows) for each in told] == [("w", ""), ("sink", "w"), ("up", "")]
    unproved = lead([coverage, find("w")], (culprit.model_copy(update={"proved": False}), [W]))
    assert not any(each.follows for each in unproved)


def test_a_race_leads_where_only_a_second_run_differs() -> None:
    race = Culprit.model_validate({"mechanism": "race", "proved": True, "here": HERE, "repaired": ()})
    repeated = [find(tensor, check=CheckName.REPEAT) for tensor in ("v", "w")]
    told = lead(repeated, (race, [W]), is_complete=True)
    assert [(each.tensor, each.culprit, each.follows) for each in told][1:] == [("v", None, "w")]
    assert told[0].culprit is not None
    assert told[0].culprit.leads
    # A comparison with the golden comes first.
    assert lead([*repeated, find("u")], (race, [W]), is_complete=True)[0].tensor == "u"
