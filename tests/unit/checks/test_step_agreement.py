"""Numbers of an optimizer's formula that are another one in each tensor, and those that are one option's."""

from __future__ import annotations

from moeverify.checks.step_agreement import keep_agreeing
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts, StepForm, TermFacts


def make_finding(tensor: str, beta: float, *, step: int = 1, share: float = 0.1) -> Finding:
    terms = (
        TermFacts(name="exp_avg", expected=0.9, found=beta, error=1e-4),
        TermFacts(name="gradient", expected=0.1, found=share, error=1e-4),
    )
    return Finding(
        check="optimizer step",
        kind="optimizer_state",
        tensor=f"{tensor}.exp_avg",
        step=step,
        rank=0,
        error=1.0,
        bound=0.01,
        code=Cause.OPTIMIZER,
        facts=RecomputedFacts(terms=terms),
    )


def read_betas(findings: list[Finding]) -> list[float | None]:
    return [finding.facts.terms[0].found for finding in findings]  # type: ignore[union-attr]


def test_a_beta_that_is_another_one_in_each_tensor_is_not_said() -> None:
    findings = [make_finding("gate", 1.84), make_finding("up", 1.39, step=2)]
    assert read_betas(keep_agreeing(findings)) == [None, None]


def test_a_beta_that_all_tensors_share_is_kept() -> None:
    findings = [
        make_finding("gate", 0.9531),
        make_finding("up", 0.9534),
        make_finding("down", 0.9528, step=2),
    ]
    assert read_betas(keep_agreeing(findings)) == [0.9531, 0.9534, 0.9528]


def test_other_terms_may_differ_from_tensor_to_tensor() -> None:
    # As of clips by groups of parameters, where the gradient has another factor in each.
    findings = [make_finding("gate", 0.9, share=0.05), make_finding("up", 0.9, share=0.02)]
    kept = keep_agreeing(findings)
    assert [finding.facts.terms[1].found for finding in kept] == [0.05, 0.02]  # type: ignore[union-attr]


def make_update(tensor: str, step: int, factor: float, *tried: str) -> Finding:
    """Return an update whose step is there by a factor, and that these corrections of moments give."""
    terms = (TermFacts(name="step", expected=-0.01, found=-0.01 * factor),)
    facts = RecomputedFacts(terms=terms, variants=tuple(StepForm(changes=(each,)) for each in tried))  # type: ignore[arg-type]
    named = {"check": "optimizer step", "kind": "update", "tensor": tensor, "step": step, "rank": 0}
    return Finding.model_validate(
        {**named, "error": 1.0, "bound": 0.01, "code": Cause.OPTIMIZER, "facts": facts}
    )


def read_forms(findings: list[Finding]) -> list[list[str]]:
    return [
        [form.changes[0] for form in finding.facts.variants]  # type: ignore[union-attr]
        for finding in keep_agreeing(findings)
    ]


def test_corrections_that_two_tensors_have_not_in_common_are_not_said() -> None:
    one, other = "no-first-correction", "corrected-for-next-step"
    assert read_forms([make_update("up", 0, 0.1, one), make_update("down", 0, 0.73, other)]) == [[], []]
    assert read_forms([make_update("up", 0, 0.1, one), make_update("down", 0, 0.1, one, other)])[0] == [one]


def test_a_correction_that_is_the_same_number_in_a_later_step_is_not_said() -> None:
    # 1 less the first beta is the first step's correction, and a rate that is a tenth.
    form = "no-first-correction"
    assert read_forms([make_update("up", 0, 0.1, form), make_update("up", 1, 0.1004)]) == [[], []]
    # Small updates in bfloat16 leave one digit.
    assert read_forms([make_update("up", 0, 0.11, form), make_update("up", 1, 0.092)]) == [[], []]
    assert read_forms([make_update("up", 0, 0.1, form), make_update("up", 1, 0.19)]) == [[form], []]
    assert read_forms([make_update("up", 0, 0.1, form), make_update("up", 1, 0.1, form)]) == [[form], [form]]


def test_one_tensor_of_three_does_not_speak_against_a_correction() -> None:
    form = "no-first-correction"
    findings = [make_update(name, 0, 0.1, form) for name in ("up", "down", "gate")]
    assert read_forms([*findings, make_update("up", 1, 0.1)]) == [[form], [form], [form], []]


def test_a_correction_is_not_said_where_another_step_is_off_by_another_one() -> None:
    one, other = "no-first-correction", "multiplied-by-corrections"
    assert read_forms([make_update("up", 0, 0.19, other), make_update("up", 1, 0.09, one)]) == [[], []]
