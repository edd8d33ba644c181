"""Wider precisions for findings without a cause, and the selection of the cases to run in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import build_case
from moeverify.faults.setting import make_case
from moeverify.report.words.cause import describe_evidence
from moeverify.report.words.wider import describe_wider
from moeverify.results.cause import Cause
from moeverify.results.culprit import Culprit
from moeverify.results.culprit import Operation as OperatorCall
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Factor, Product
from moeverify.results.facts import ClipFacts, ObjectiveFacts, OwnStep, RouterFacts, RouterGradientFacts
from moeverify.results.finding import CheckResult, Finding, Wider
from moeverify.results.observation import HiddenByRounding
from moeverify.results.operation import Altered, Operation, OwnValues, Rounded, Scaled, Unmoved, Unreduced
from moeverify.results.part import WHOLE, Contribution, Part
from moeverify.results.run import CaseResult, RunResult
from moeverify.results.step_facts import RecomputedFacts, TermFacts
from moeverify.results.upstream import OffUpstream
from moeverify.verification.controller import escalation
from moeverify.verification.controller.escalation import (
    asks_confirmation,
    choose_confirming,
    confirm,
    find_confirming,
    list_wider,
    merge,
    needs_escalation,
)
from moeverify.verification.controller.options import RunOptions


def find(tensor: str, **fields: Any) -> Finding:
    return Finding(
        check="gradient", kind="gradient", tensor=tensor, step=0, rank=0, error=1.0, bound=0.1, **fields
    )


def answer(*findings: Finding, verdict: Any = "mismatch", reason: str = "") -> CaseResult:
    return CaseResult(
        name="c", file="c.yaml", verdict=verdict, reason=reason, ranks=2, seconds=1.0, findings=findings
    )


NAMED = find("w", code=Cause.SCALE)
UNKNOWN = find("w", unexplained=("w",))


def explain(operation: Operation, cause: Cause = Cause.BACKWARD, tensor: str = "w") -> Finding:
    subject = Subject(quantity=Quantity.GRADIENT, tensors=(tensor,))
    explanation = Explanation(cause=cause, subject=subject, operation=operation)
    return find(tensor, explanation=explanation, code=cause)


def scale(value: float, *equals: Product, part: Part = WHOLE) -> Scaled:
    return Scaled(contributions=(Contribution(part=part, factor=Factor(value=value, equals=equals)),))


def explain_module(operation: Operation, cause: Cause) -> Finding:
    subject = Subject(quantity=Quantity.MODULE_GRADIENT, module="m")
    return find("w", explanation=Explanation(cause=cause, subject=subject, operation=operation), code=cause)


PLACED = explain(Altered())
PART = Unreduced(axes=(Product(times=("tp",)),), num_replicas=2, factor=Factor(value=1.0))
UNREDUCED = explain_module(PART, Cause.MISSING_REDUCTION)
EXPLAINED = explain(scale(2.0, Product(times=("tp",))), Cause.SCALE)


def test_cases_whose_leading_finding_names_no_operation_are_asked() -> None:
    assert needs_escalation(answer(UNKNOWN))
    assert needs_escalation(answer(UNKNOWN, find("v", code=Cause.SCALE, follows="w")))
    assert needs_escalation(answer(UNKNOWN, NAMED))
    assert needs_escalation(answer(PLACED, NAMED))
    assert not needs_escalation(answer(NAMED, UNKNOWN))
    assert not needs_escalation(answer(verdict="pass"))
    asked = UNKNOWN.model_copy(update={"wider": (Wider(precision="float64", outcome="unexplained"),)})
    assert not needs_escalation(answer(asked))


@pytest.mark.parametrize(
    "operation",
    [
        Altered(),
        Altered(first_micro_batch=1),
        OwnValues(ranks=(1,)),
        scale(1.02216),
        scale(0.0),
    ],
)
def test_a_place_a_size_and_a_measured_number_name_no_operation(operation: Operation) -> None:
    assert needs_escalation(answer(explain(operation)))


@pytest.mark.parametrize(
    "operation",
    [
        Rounded(dtype="bfloat16"),
        Unmoved(),
        scale(2.0, Product(times=("tp",))),
        scale(0.3, part=Part(term="balance")),
    ],
)
def test_what_was_done_is_a_cause(operation: Operation) -> None:
    assert not needs_escalation(answer(explain(operation)))


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (RouterFacts(quantity="weights", num_wrong=3, num_tokens=4), Cause.FORWARD),
        (RouterFacts(quantity="choice", num_wrong=3, num_tokens=4, margin=9.0), Cause.ROUTING),
        (RouterGradientFacts(term="balance", factors={0: None, 1: None}), Cause.FORWARD),
        (ClipFacts(), Cause.NORM),
        (ClipFacts(is_coefficient=True), Cause.NORM),
        (ObjectiveFacts(), Cause.FORWARD),
        (RecomputedFacts(terms=(TermFacts(name="gradient", expected=1.0),)), Cause.STATE),
    ],
)
def test_a_result_that_is_only_seen_to_be_another_one_is_asked(facts: Any, code: Cause) -> None:
    seen = find("w", code=code, facts=facts)
    assert needs_escalation(answer(seen))
    cause, before = merge(
        answer(seen), [("float32", answer(PLACED)), ("float64", answer(EXPLAINED))]
    ).findings
    assert (cause.wider[0].precision, before.follows) == ("float64", "w")
    (kept,) = merge(answer(seen), [("float64", answer(PLACED))]).findings
    assert (kept.code, kept.follows) == (code, "")


@pytest.mark.parametrize(
    "facts",
    [
        RouterGradientFacts(term="balance", factors={0: 2.0, 1: 2.0}),
        RouterGradientFacts(term="z padding", factors={0: None}),
    ],
)
def test_a_result_that_is_known_to_be_another_multiple_is_not(facts: Any) -> None:
    assert not needs_escalation(answer(find("w", code=Cause.SCALE, facts=facts)))


def test_runs_that_differ_are_explained_by_that() -> None:
    assert not needs_escalation(answer(explain(Altered(), Cause.NONDETERMINISM)))


@pytest.mark.parametrize(
    ("precision", "wider"),
    [
        ("bfloat16", ["float32", "float64"]),
        ("mixed", ["float32", "float64"]),
        ("float32", ["float64"]),
        ("float64", []),
    ],
)
def test_each_precision_has_its_wider_ones(precision: str, wider: list[str]) -> None:
    recipe = {"model": {"preset": "tiny-gpt"}, "precision": precision}
    case = build_case({"name": "c", "recipe": recipe, "layout": {"dp_shard": 2}})
    asked = list_wider(case)
    assert [each.recipe.precision for each in asked] == wider
    assert [each.name for each in asked] == [f"c-{each}" for each in wider]


def test_what_persists_is_named_there() -> None:
    merged = merge(answer(UNKNOWN), [("float32", answer(UNKNOWN)), ("float64", answer(NAMED))])
    cause, before = merged.findings
    assert (cause.code, cause.wider[0].precision, cause.follows) == (Cause.SCALE, "float64", "")
    assert before.follows == "w"
    assert [each.outcome for each in before.wider] == ["unexplained", "named"]
    assert describe_wider(cause) == ("found in float64, where rounding hides less",)


def test_what_vanishes_is_a_matter_of_precision() -> None:
    merged = merge(
        answer(UNKNOWN), [("float32", answer(verdict="pass")), ("float64", answer(verdict="pass"))]
    )
    (finding,) = merged.findings
    assert finding.follows == ""
    assert describe_wider(finding) == ("in float32 and float64 nothing differs: it is a matter of precision",)


def test_what_cannot_run_is_told() -> None:
    refused = answer(verdict="skipped", reason="megablocks has no float64")
    (finding,) = merge(answer(UNKNOWN), [("float64", refused)]).findings
    assert describe_wider(finding) == ("float64 did not run: megablocks has no float64",)


def test_a_cause_found_wider_leads_a_place() -> None:
    merged = merge(answer(PLACED), [("float32", answer(PLACED)), ("float64", answer(EXPLAINED))])
    cause, before = merged.findings
    assert (cause.code, cause.follows, before.follows) == (Cause.SCALE, "", "w")
    assert [each.outcome for each in before.wider] == ["alike", "named"]


def test_a_place_found_wider_does_not_lead_a_place() -> None:
    merged = merge(answer(PLACED), [("float64", answer(explain(Altered(), Cause.FORWARD)))])
    (finding,) = merged.findings
    assert (finding.code, finding.follows) == (Cause.BACKWARD, "")
    assert describe_wider(finding) == ("in float64 it differs too, and no more of the cause is seen",)


def test_a_place_found_wider_leads_what_has_none() -> None:
    place, before = merge(answer(UNKNOWN), [("float64", answer(PLACED))]).findings
    assert (place.code, before.follows) == (Cause.BACKWARD, "w")


def test_the_precision_that_says_most_leads_and_not_the_widest() -> None:
    merged = merge(answer(UNKNOWN), [("float32", answer(EXPLAINED)), ("float64", answer(PLACED))])
    assert merged.findings[0].wider[0].precision == "float32"


def test_what_names_its_own_operation_stays_beside_the_leading_cause() -> None:
    other = explain(Unmoved(), Cause.STALE, "v")
    cause, place, own = merge(answer(PLACED, other), [("float64", answer(EXPLAINED))]).findings
    assert (cause.follows, place.follows, own.follows) == ("", "w", "")


def test_what_wider_precisions_were_asked_is_not_advised() -> None:
    hint = HiddenByRounding(precision="float32")
    unknown = find("w", unexplained=("w",), observations=(hint,))
    (asked,) = merge(answer(unknown), [("float64", answer(UNKNOWN))]).findings
    assert any("--set recipe.precision=float64" in line for line in describe_evidence(unknown))
    assert not any("--set recipe.precision=float64" in line for line in describe_evidence(asked))


def estimate(finding: Finding) -> Finding:
    assert finding.explanation is not None
    explanation = finding.explanation.model_copy(update={"is_estimate": True})
    return finding.model_copy(update={"explanation": explanation})


def test_an_estimate_of_16_bits_is_asked_and_leads_until_a_wider_run_says_what_was_done() -> None:
    guess = estimate(EXPLAINED)
    assert needs_escalation(answer(guess))
    sure = explain(Unmoved(), Cause.STALE, "v")
    cause, before = merge(answer(guess), [("float32", answer(PLACED)), ("float64", answer(sure))]).findings
    assert (cause.tensor, cause.wider[0].precision, before.follows) == ("v", "float64", "v")
    for silent in (answer(PLACED), answer(UNKNOWN), answer(verdict="pass")):
        (kept,) = merge(answer(guess), [("float64", silent)]).findings
        assert (kept.code, kept.follows) == (Cause.SCALE, "")


def test_a_coefficient_of_a_step_that_is_no_number_of_the_run_is_an_estimate() -> None:
    facts = RecomputedFacts(terms=(TermFacts(name="gradient", expected=1.0, found=2.0),))
    guess = find("w", code=Cause.SCALE, facts=facts)
    assert guess.is_estimate
    assert needs_escalation(answer(guess))


def trace(tensor: str = "w", **fields: Any) -> Finding:
    """Return a finding of which only the first wrong operation is known."""
    culprit = Culprit(mechanism="place", proved=False, here=OperatorCall(operator="mm"), leads=True)
    return find(tensor, culprit=culprit, code=Cause.BACKWARD, **fields)


def test_a_first_wrong_operation_leads_places_and_refutes_parts_of_sums() -> None:
    for narrow in (PLACED, UNREDUCED):
        assert needs_escalation(answer(narrow))
        lead, before = merge(answer(narrow), [("float64", answer(trace("v")))]).findings
        assert (lead.tensor, lead.wider[0].precision, before.follows) == ("v", "float64", "v")
    for narrow in (find("w", code=Cause.OPTIMIZER), estimate(EXPLAINED)):
        (kept,) = merge(answer(narrow), [("float64", answer(trace("v")))]).findings
        assert (kept.tensor, kept.follows) == ("w", "")
    sure, own = merge(answer(trace("v")), [("float64", answer(EXPLAINED))]).findings
    assert (sure.tensor, own.follows) == ("w", "w")


def test_a_cause_fitted_to_a_modules_gradient_is_sure_with_the_operations_of_the_step() -> None:
    culprit = Culprit(mechanism="total", proved=True, here=OperatorCall(operator="mm"))
    assert needs_escalation(answer(UNREDUCED))
    assert not needs_escalation(answer(UNREDUCED.model_copy(update={"culprit": culprit})))


def test_the_cause_of_a_mismatch_in_a_confirming_run_is_searched_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"c-float32": UNREDUCED, "c-float32-float64": trace("v"), "d-float32": EXPLAINED}

    def run(cases: Sequence[Case], *_: object) -> RunResult:
        ran.append([case.name for case in cases])
        found = [answer(answers[case.name]).model_copy(update={"name": case.name}) for case in cases]
        return RunResult(verdict="mismatch", environment={}, cases=tuple(found), launches=1)

    ran: list[list[str]] = []
    monkeypatch.setattr(escalation, "run_cases", run)
    cases = [in_precision("bfloat16", name) for name in "cd"]
    undecided = [answer(verdict="undecided").model_copy(update={"name": case.name}) for case in cases]
    result = RunResult(verdict="undecided", environment={}, cases=tuple(undecided))
    done = escalation.escalate(cases, result, RunOptions(), lambda event: None)
    assert ran == [["c-float32", "d-float32"], ["c-float32-float64"]]
    traced, fitted = done.cases
    assert [(each.tensor, each.follows) for each in traced.findings] == [("v", ""), ("w", "v")]
    assert (traced.findings[0].wider[0].precision, traced.findings[0].wider[0].outcome) == (
        "float64",
        "found",
    )
    assert fitted.findings[0].wider[0].precision == "float32"
    assert done.launches == 2


def test_exceptions_to_mixed_precision_do_not_keep_a_case_from_wider_runs() -> None:
    recipe = {"name": "r", "model": {"factory": "own:make", "vocab_size": 8}, "precision": "mixed"}
    layout = {"dp_shard": 2, "parallelize": "own:shard", "in_float32": ["norm"]}
    case = build_case({"name": "c", "recipe": recipe, "layout": layout})
    assert [each.recipe.precision for each in list_wider(case)] == ["float32", "float64"]


def in_precision(precision: str, name: str = "c", **layout: Any) -> Case:
    return make_case(name, recipe={"precision": precision}, **{"dp_shard": 2, **layout})


def test_a_case_that_passes_is_asked_in_the_widest_precision_that_its_layout_knows() -> None:
    (wide,) = find_confirming([in_precision("bfloat16")], []).values()
    assert (wide.name, wide.recipe.precision) == ("c-float64", "float64")
    (wide,) = find_confirming([in_precision("bfloat16", experts="grouped_mm", ep=2)], []).values()
    assert wide.recipe.precision == "float32"


def test_a_case_is_not_asked_where_another_one_is_the_same_in_float64() -> None:
    case = in_precision("bfloat16")
    assert not find_confirming([case], [case, in_precision("float64", "other")])
    assert find_confirming([case], [case, in_precision("float64", "other", tp=2)])


def test_dtypes_of_a_users_own_code_may_stay_as_they_are() -> None:
    assert not find_confirming([in_precision("bfloat16", parallelize="own:shard")], [])
    assert not find_confirming([in_precision("float64")], [])
    scaled = make_case("c", recipe={"precision": "bfloat16", "float8": "rowwise"}, dp_shard=2)
    assert not find_confirming([scaled], [])


def stepped(**fields: Any) -> CaseResult:
    """Return the pass of a case whose own step has results that no check can recompute."""
    own = OwnStep(step="own:step", num_tensors=2, first="w")
    checks = (CheckResult(name="optimizer step", verdict="pass", tensors=1, facts=own),)
    return answer(verdict="pass").model_copy(update={"checks": checks, **fields})


def test_a_pass_of_a_users_own_step_is_asked_where_no_check_could_compute_it_again() -> None:
    model = {"factory": "own:make", "vocab_size": 8}
    recipe = {"name": "r", "model": model, "precision": "bfloat16", "step": "own:step"}
    case = build_case({"name": "c", "recipe": recipe, "layout": {"dp_shard": 2, "parallelize": "own:shard"}})
    confirming = find_confirming([case], [])
    assert asks_confirmation(stepped(), confirming)
    assert not asks_confirmation(answer(verdict="pass"), confirming)
    assert not asks_confirmation(stepped(), {})
    assert asks_confirmation(answer(verdict="pass"), find_confirming([in_precision("bfloat16")], []))


def test_of_a_users_own_step_that_differs_in_a_wider_precision_what_differs_before_is_no_verdict() -> None:
    update = find("w").model_copy(update={"check": "update", "kind": "update"})
    later = find("v").model_copy(update={"step": 1})
    assert confirm(stepped(), "float64", answer(update, later)).verdict == "mismatch"
    told = confirm(stepped(), "float64", answer(find("v"), update))
    assert (told.verdict, told.findings) == ("pass", ())
    assert "before the optimizer's step" in told.notes[-1]


def test_float32_decides_an_undecided_case_of_a_users_own_step() -> None:
    model = {"factory": "own:make", "vocab_size": 8}
    recipe = {"name": "r", "model": model, "precision": "bfloat16", "step": "own:step"}
    case = build_case({"name": "c", "recipe": recipe, "layout": {"dp_shard": 2, "parallelize": "own:shard"}})
    confirming = find_confirming([case], [])
    chosen = {
        verdict: choose_confirming(case, stepped(verdict=verdict), confirming)
        for verdict in ("pass", "undecided")
    }
    assert {verdict: wide and wide.recipe.precision for verdict, wide in chosen.items()} == {
        "pass": "float64",
        "undecided": "float32",
    }
    told = confirm(stepped(verdict="undecided"), "float32", answer(find("v")))
    assert told.verdict == "mismatch"


def test_what_a_wider_precision_finds_where_a_case_passes_is_the_verdict() -> None:
    later = find("v", follows="w")
    told = confirm(answer(verdict="pass"), "float64", answer(EXPLAINED, later))
    assert (told.name, told.verdict) == ("c", "mismatch")
    lead, follower = told.findings
    assert (lead.wider[0].precision, lead.wider[0].outcome) == ("float64", "found")
    assert follower == later
    assert "found in float64" in " ".join(describe_evidence(lead))
    assert told.notes == ("it passes in its own precision: all that is shown is of the run in float64",)


def test_a_case_stays_as_it_is_where_a_wider_precision_passes_or_does_not_run() -> None:
    passing = answer(verdict="pass")
    told = confirm(passing, "float64", answer(verdict="pass"))
    assert (told.verdict, told.notes) == ("pass", ("in float64 it passes, too",))
    told = confirm(passing, "float64", answer(verdict="error", reason="out of memory"))
    assert told.verdict == "pass"
    assert told.notes == ("it did not run in float64, which would see more: out of memory",)


@pytest.mark.parametrize("wide", [UNKNOWN, PLACED, EXPLAINED])
def test_what_a_wider_run_finds_leads_where_the_cause_is_elsewhere(wide: Finding) -> None:
    """A norm consistent with its own gradients implies wrong gradients: a wider run finds them."""
    open_one = explain(OffUpstream(factor=Factor(value=0.99), limit=0.2, is_sure=True))
    assert needs_escalation(answer(open_one))
    first, *others = merge(answer(open_one), [("float32", answer(wide)), ("float64", answer(wide))]).findings
    assert (first.explanation, first.is_of_wider_run) == (wide.explanation, True)
    assert all(each.follows == first.tensor for each in others)


def test_a_line_of_a_wider_run_leads_where_no_term_of_the_step_explains_an_update() -> None:
    update = find("w", code=Cause.OPTIMIZER).model_copy(update={"kind": "update"})
    line = Culprit(mechanism="place", proved=False, here=OperatorCall(operator="mm"), leads=True)
    wide = answer(find("v", culprit=line))
    leads = {}
    for terms in ((), (TermFacts(name="weight decay", expected=1.0, found=2.0),)):
        case = answer(update.model_copy(update={"facts": RecomputedFacts(terms=terms)}))
        leads[len(terms)] = merge(case, [("float64", wide)]).findings[0].tensor
    assert leads == {0: "v", 1: "w"}


def test_where_no_wider_run_differs_the_open_question_is_kept() -> None:
    open_one = explain(OffUpstream(factor=Factor(value=0.99), limit=0.2))
    (kept,) = merge(answer(open_one), [("float64", answer(verdict="pass"))]).findings
    assert kept.follows == ""
