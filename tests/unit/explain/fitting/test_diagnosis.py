"""Findings in, causes and places out: origins, their consequences, and a failed diagnosis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from wrong_tensors import AXES, combine, draw, make_components, make_inputs, make_origin, make_tensor

from moeverify.explain.fitting.diagnosis import diagnose
from moeverify.explain.fitting.failure import describe_failure, keep_verdict
from moeverify.explain.fitting.inputs import DiagnosisInputs, Issued
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.collective import IssuedCollective
from moeverify.results.data import BatchField, DataFacts, Misread, MisreadOnRank, ReadSource, SourceKind
from moeverify.results.explanation import Quantity
from moeverify.results.facts import CoverageFacts, GatheredFacts, ShardingFacts
from moeverify.results.finding import Finding
from moeverify.results.observation import DiagnosisFailed, FirstDivergence, HiddenByRounding
from moeverify.results.operation import OwnValues
from moeverify.results.part import Part
from moeverify.results.place import Place, Stage

NAME = "layers.0.mlp.weight"


def find(check: str, tensor: str = NAME, kind: str = "", **fields: Any) -> Finding:
    content = {"step": 0, "rank": 1, "ranks": (0, 1), "error": 1.0, "bound": 1e-10, **fields}
    return Finding.model_validate({"check": check, "tensor": tensor, "kind": kind or check, **content})


def double(name: str = NAME, **fields: Any) -> Any:
    expected = draw(4, 4)
    return make_tensor(expected, 2 * expected, 2 * expected, name=name, **fields)


def test_an_origin_carries_its_place_and_what_follows_none() -> None:
    tensor = double()
    collective = IssuedCollective(direction="backward", op="all_reduce", axis="ep", group=(0, 1))
    inputs = make_inputs(tensor, issued=lambda module, rank: Issued(module, (collective,)))
    origin, follower = diagnose([find("gradient"), find("update")], inputs)
    assert origin.explanation.cause is Cause.SCALE
    assert origin.code == "scale"
    assert origin.place == Place(
        module="layers.0.mlp",
        ranks=(0, 1),
        axes=("dp_replicate", "ep"),
        stage=Stage.BACKWARD,
        issued=(collective,),
        issued_in="layers.0.mlp",
    )
    assert follower.follows == origin.tensor
    assert (follower.place, follower.explanation) == (None, None)


@pytest.mark.parametrize("how", ["is_repeated", "is_elsewhere"])
def test_a_layer_on_a_wrong_stage_comes_before_what_is_computed_with_it(how: str) -> None:
    facts = ShardingFacts(axis="pp", modules=("layers.2",)).model_copy(update={how: True})
    sharding = find("sharding", "axis pp", Kind.INITIAL_WEIGHT, step=-1, facts=facts)
    first, *others = diagnose([find("gradient"), find("clip", "total"), sharding], make_inputs(double()))
    assert (first.check, first.code) == ("sharding", Cause.LAYOUT)
    assert {other.check for other in others} == {"gradient", "clip"}
    assert all(other.follows == first.tensor for other in others)
    # An axis that divides nothing leads as before: the difference may have another cause.
    alone = sharding.model_copy(update={"facts": ShardingFacts(axis="pp")})
    assert diagnose([find("gradient"), alone], make_inputs(double()))[0].check == "gradient"


def test_tensors_of_a_kind_that_only_its_check_knows_are_explained_if_nothing_else_is_wrong() -> None:
    tensor = double(kind="hidden states")
    (origin,) = diagnose([find("hidden states")], make_inputs(tensor))
    assert (origin.unexplained, origin.explanation.cause) == ((), Cause.SCALE)
    assert origin.explanation.subject.quantity is Quantity.TENSOR
    assert origin.place.axes == ("dp_replicate", "ep")
    unknown = make_tensor(draw(8), *2 * [draw(8, seed=4)], kind="hidden states")
    (origin,) = diagnose([find("hidden states")], make_inputs(unknown))
    assert origin.unexplained == (NAME,)


def test_no_words_are_made() -> None:
    tensors = [double(), make_tensor(draw(8), draw(8, seed=4), name="head")]
    for finding in diagnose([find("gradient"), find("gradient", "head")], make_inputs(*tensors)):
        assert (finding.cause, finding.where, finding.evidence) == ("", "", ())


def test_the_earliest_step_and_the_earliest_part_of_it_are_the_origin() -> None:
    loss = make_tensor(torch.tensor(1.0), torch.tensor(2.0), name="lm", kind="loss")
    gradient = double(step=0)
    findings = [find("update", step=1), find("gradient norm", "total"), find("gradient"), find("loss", "lm")]
    origin, *rest = diagnose(findings, make_inputs(loss, gradient))
    assert (origin.check, origin.step) == ("gradient", 0)
    assert {finding.follows for finding in rest} == {NAME}


def test_a_kind_whose_check_passed_is_not_examined() -> None:
    # Replicas differ in a gradient by less than the bound of its own check: the gradient is not wrong.
    finding = find("replicas", kind="gradient", place=Place(axes=("dp_replicate",)))
    (told,) = diagnose([finding], make_inputs(double()))
    assert told.code == Cause.REPLICAS
    assert told.explanation.operation == OwnValues(ranks=(0, 1), axes=("dp_replicate",))
    assert told.explanation.subject.quantity is Quantity.GRADIENT
    assert told.place.axes == ("dp_replicate",)


def test_what_nothing_explains_stands_for_all_of_it() -> None:
    tensors = [make_tensor(draw(8), draw(8, seed=n + 2), name=f"w{n}") for n in range(3)]
    findings = [find("gradient", f"w{n}", error=float(n)) for n in range(3)]
    origin, *rest = diagnose(findings, make_inputs(*tensors))
    assert (origin.tensor, origin.unexplained, origin.explanation) == ("w2", ("w0", "w1", "w2"), None)
    assert {finding.follows for finding in rest} == {"w2"}


def test_choices_without_a_tensor_to_examine_follow_the_router_that_was_scored_again() -> None:
    router = "layers.1.moe.router"
    flips = find("routing flips", router, kind="router_flips")
    scored = find("router", router, kind="router_ids", code="routing", error=81.0)
    origin, follower = diagnose([flips, scored], make_inputs())
    assert (origin.check, origin.follows) == ("router", "")
    assert (follower.check, follower.follows) == ("routing flips", router)


def test_choices_without_a_tensor_to_examine_are_unexplained_by_themselves() -> None:
    router = "layers.1.moe.router"
    (origin,) = diagnose([find("routing flips", router, kind="router_flips")], make_inputs())
    assert (origin.unexplained, origin.explanation) == ((router,), None)


@pytest.mark.parametrize(("precision", "says"), [(torch.float64, False), (torch.bfloat16, True)])
def test_where_rounding_may_hide_a_cause_it_is_noted(precision: torch.dtype, says: bool) -> None:
    tensor = make_tensor(draw(6, 4), *2 * [draw(6, 4, seed=3)], precision=precision)
    (told,) = diagnose([find("gradient", bound=0.1)], make_inputs(tensor))
    assert told.unexplained
    assert (HiddenByRounding(precision="bfloat16") in told.observations) == says


def test_the_first_divergence_explains_the_losses_and_everything_after() -> None:
    tensor, inputs = make_origin(draw(2, 3, 4), *2 * [draw(2, 3, 4, seed=1)])
    loss = make_tensor(torch.tensor(1.0), torch.tensor(2.0), name="lm", kind="loss")
    inputs = replace(inputs, tensors={loss.key: loss})
    origin, *_ = diagnose([find("gradient"), find("loss", "lm")], inputs)
    assert (origin.tensor, origin.code) == ("lm", Cause.FORWARD)
    assert (origin.place.module, origin.place.stage) == ("layers.0.moe", Stage.FORWARD)
    assert isinstance(origin.observations[0], FirstDivergence)
    assert origin.observations[0].module == tensor.name


def test_gradients_that_no_sum_explains_get_the_module_from_which_on_they_are_wrong() -> None:
    _, inputs = make_origin(draw(2, 3, 4), *2 * [draw(2, 3, 4, seed=1)], direction="backward")
    gradient = make_tensor(draw(8), *2 * [draw(8, seed=5)])
    (origin,) = diagnose([find("gradient")], replace(inputs, tensors={gradient.key: gradient}))
    assert (origin.code, origin.place.module) == (Cause.BACKWARD, "layers.0.moe")


def test_gradients_that_are_rounded_keep_this_cause_and_get_the_module() -> None:
    _, inputs = make_origin(draw(2, 3, 4), *2 * [draw(2, 3, 4, seed=1)], direction="backward")
    expected = draw(16, 8)
    gradient = make_tensor(expected, *2 * [expected.bfloat16().double()])
    (origin,) = diagnose([find("gradient")], replace(inputs, tensors={gradient.key: gradient}))
    assert (origin.code, origin.place.module) == (Cause.ROUNDING, "layers.0.moe")
    assert origin.explanation.subject.tensors == (NAME,)


def test_a_cause_comes_before_the_module_from_which_on_more_gradients_are_wrong() -> None:
    _, inputs = make_origin(draw(2, 3, 4), *2 * [draw(2, 3, 4, seed=1)], direction="backward")
    zero = make_tensor(draw(8), *2 * [0 * draw(8)], name="layers.1.moe.router.weight")
    others = [make_tensor(draw(8), *2 * [draw(8, seed=n + 5)], name=f"layers.0.w{n}") for n in range(3)]
    tensors = {tensor.key: tensor for tensor in (*others, zero)}
    findings = [find("gradient", tensor.name) for tensor in tensors.values()]
    told = diagnose(findings, replace(inputs, tensors=tensors))
    assert [finding.code for finding in told if not finding.follows] == [Cause.DETACHED, Cause.BACKWARD]


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["layers.1.attention.q_proj.weight", "layers.1.attention_norm.weight"], ["module", "scale"]),
        (["layers.1.attention.o_proj.weight"], ["module", "scale"]),
        # A later module in forward order got its gradient earlier.
        (["layers.1.attention.q_proj.weight", "layers.2.mlp.weight"], ["scale", "module"]),
    ],
)
@pytest.mark.parametrize("factor", [1.06, 2.0])
def test_a_module_that_is_known_comes_before_a_factor_that_nothing_names(
    names: list[str], order: list[str], factor: float
) -> None:
    right = draw(2, 3, 4)
    module = "layers.1.attention.o_proj"
    # Everything that it passes back is zero, and this is known.
    _, inputs = make_origin(right, 0 * right, 0 * right, module=module, direction="backward")
    shown = [make_tensor(draw(8), *2 * [factor * draw(8)], name=name) for name in names]
    shown.append(make_tensor(draw(8), *2 * [draw(8, seed=5)], name="layers.0.w"))
    known = ["layers.0.w", "layers.1.attention_norm.weight"]
    known += [f"layers.1.attention.{name}_proj.weight" for name in "qo"] + ["layers.2.mlp.weight"]
    regions = {name: {0: Region.whole((8,))} for name in known}
    tensors = {tensor.key: tensor for tensor in shown}
    told = diagnose(
        [find("gradient", tensor.name) for tensor in shown],
        replace(inputs, tensors=tensors, regions=regions),
    )
    explanations = [each.explanation for each in told if each.explanation and not each.follows]
    found = ["module" if each.subject.module else each.cause.value for each in explanations]
    # Twice is the size of an axis: the sum over it may be wrong.
    assert found == (order if factor == 1.06 else ["scale", "module"])


def test_gradients_that_a_sum_explains_do_not_need_the_module() -> None:
    _, inputs = make_origin(draw(2, 3, 4), *2 * [draw(2, 3, 4, seed=1)], direction="backward")
    gradient = double()
    (origin,) = diagnose([find("gradient")], replace(inputs, tensors={gradient.key: gradient}))
    assert (origin.code, origin.place.module) == (Cause.SCALE, "layers.0.mlp")


def test_a_norm_is_the_cause_of_the_coefficient_made_of_it() -> None:
    values = {"total": (1.0, 2.0), "clip_coefficient": (1.0, 0.5)}
    tensors = [
        make_tensor(
            *(torch.tensor(each, dtype=torch.float64) for each in pair), name=name, kind="gradient_norm"
        )
        for name, pair in values.items()
    ]
    findings = [find("gradient norm", name, kind="gradient_norm") for name in values]
    origin, follower = diagnose(findings, make_inputs(*tensors))
    assert (origin.tensor, origin.code, origin.place.stage) == ("total", Cause.NORM, Stage.GRADIENT_NORM)
    assert follower.follows == "total"


def test_parts_of_a_loss_are_in_the_place() -> None:
    components = make_components()
    tensors = combine(components, lambda term, cell: 0.0 if term == "z" else 1.0)
    findings = [find("gradient", tensor.name) for tensor in tensors]
    origin, _ = diagnose(findings, make_inputs(*tensors, components=components))
    assert origin.place.parts == (Part(term="z"),)


@pytest.mark.parametrize(
    ("check", "code"),
    [
        ("repeat", Cause.NONDETERMINISM),
        ("sharding", Cause.LAYOUT),
        ("precision", Cause.PRECISION),
        ("coverage", ""),
    ],
)
def test_checks_of_a_run_with_itself_have_their_own_causes(check: str, code: str) -> None:
    (told,) = diagnose([find(check, kind="weight", step=-1)], DiagnosisInputs(axes=AXES))
    assert told.code == code


def test_a_later_repeat_follows_a_wrong_gradient_and_sharding_does_not() -> None:
    findings = [find("gradient"), find("sharding", "axis ep"), find("repeat", kind="weight", step=1)]
    found = diagnose(findings, make_inputs(double()))
    assert [(finding.check, finding.follows) for finding in found] == [
        ("gradient", ""),
        ("sharding", ""),
        ("repeat", NAME),
    ]


# failures


def test_a_diagnosis_that_raises_leaves_the_findings_and_says_how() -> None:
    findings = [find("gradient"), find("update")]

    def explain() -> list[Finding]:
        raise ZeroDivisionError("planted")

    first, second = keep_verdict(findings, explain)
    (failure,) = first.observations
    assert isinstance(failure, DiagnosisFailed)
    assert (failure.error, failure.message) == ("ZeroDivisionError", "planted")
    assert failure.site.startswith("test_diagnosis.py:")
    assert first.model_copy(update={"observations": ()}) == findings[0]
    assert second == findings[1]
    assert keep_verdict([], explain) == []


def test_the_site_of_a_failure_in_our_code_is_a_path_in_it() -> None:
    with pytest.raises(AttributeError) as raised:
        diagnose([find("gradient")], replace(make_inputs(double()), axes=None))  # type: ignore[arg-type]
    assert describe_failure(raised.value).site.startswith("moeverify/explain/fitting/")


def test_what_is_raised_deep_inside_is_kept_from_the_verdict() -> None:
    gradient = make_tensor(draw(8), draw(8, seed=1))
    inputs = replace(make_inputs(gradient), components=lambda: 1 / 0)
    findings = [find("gradient")]
    (told,) = keep_verdict(findings, lambda: diagnose(findings, inputs))
    assert told.observations[0].error == "ZeroDivisionError"


def test_what_no_rank_has_of_the_model_leads_and_all_else_follows() -> None:
    nothing, half = CoverageFacts(num_held=0), CoverageFacts(num_held=8, num_elements=16)
    state = {"kind": Kind.INITIAL_WEIGHT, "step": -1}
    findings = [
        find("initial state", **state),
        find("coverage", "layers.2.mlp.weight", facts=nothing, **state),
        find("coverage", "layers.2.norm.weight", facts=nothing, **state),
        find("coverage", "embed.weight", facts=half, **state),
        find("loss", "lm", kind="loss"),
        find("coverage", "layers.2.norm.weight", kind="gradient", facts=nothing),
    ]
    first, part, *others = diagnose(findings, make_inputs(double()))
    assert (first.code, first.tensor) == ("missing", "layers.2.mlp.weight")
    assert first.explanation.subject.tensors == ("layers.2.mlp.weight", "layers.2.norm.weight")
    assert (part.tensor, part.explanation, part.follows) == ("embed.weight", None, "")
    assert [each.check for each in others] == ["initial state", "coverage", "loss", "coverage"]
    assert {each.follows for each in others} == {first.tensor}


def find_data(step: int) -> Finding:
    misread = Misread(
        batch=BatchField.TOKENS,
        step=step,
        micro_batch=0,
        num_micro_batches=1,
        num_wrong=1,
        num_elements=2,
        source=ReadSource(kind=SourceKind.ORDER),
    )
    facts = DataFacts(read=(MisreadOnRank(rank=1, misread=misread),))
    return find("data", "tokens", step=step, code=Cause.DATA, facts=facts)


def test_other_data_lead_and_what_is_computed_of_them_has_no_cause() -> None:
    inputs = make_inputs(double())
    wrong = [find("gradient"), find("objective", "z", kind=Kind.LOSS), find("sharding", "axis ep", step=-1)]
    found = diagnose([*wrong, find_data(1), find_data(0)], inputs)
    assert [(each.check, each.step, each.follows) for each in found] == [
        ("data", 0, ""),
        ("sharding", -1, ""),
        ("data", 1, "tokens"),
        ("gradient", 0, "tokens"),
        ("objective", 0, "tokens"),
    ]
    assert [each.code for each in found[3:]] == ["", ""]
    assert all(each.explanation is None for each in found[2:])


def test_what_was_wrong_before_other_data_were_read_keeps_its_cause() -> None:
    found = diagnose([find("gradient"), find_data(2)], make_inputs(double()))
    assert [(each.check, each.code, each.follows) for each in found] == [
        ("data", Cause.DATA, ""),
        ("gradient", Cause.SCALE, ""),
    ]


def test_tokens_that_nobody_has_lead_where_no_rank_is_known_to_have_read_others() -> None:
    facts = CoverageFacts(num_held=6, num_elements=8)
    uncovered = find("coverage", "lm", kind=Kind.TOKEN_LOSS, facts=facts)
    found = diagnose([find("gradient"), uncovered], make_inputs(double()))
    assert [(each.check, each.follows) for each in found] == [("coverage", ""), ("gradient", "lm")]
    assert found[0].code == Cause.DATA


def test_a_gradient_that_is_not_covered_is_no_missing_state() -> None:
    missing = find("coverage", "embed.weight", kind="gradient", facts=CoverageFacts(num_held=0))
    first, *_ = diagnose([find("gradient"), missing], make_inputs(double()))
    assert first.code == "scale"


def test_moments_of_a_parameter_without_a_gradient_follow_from_that() -> None:
    absent = make_tensor(draw(4, 4), None, None, name=NAME)
    nothing = CoverageFacts(num_held=0)
    findings = [
        find("gradient"),
        find("coverage", f"{NAME}.exp_avg", kind="optimizer_state", facts=nothing),
        find("coverage", "norm.weight.exp_avg", kind="optimizer_state", facts=nothing),
    ]
    found = {each.tensor: each.follows for each in diagnose(findings, make_inputs(absent))}
    assert found == {NAME: "", f"{NAME}.exp_avg": NAME, "norm.weight.exp_avg": ""}
    has_gradients = {each.tensor: each.follows for each in diagnose(findings, make_inputs(double()))}
    assert has_gradients[f"{NAME}.exp_avg"] == ""


def test_a_run_that_did_not_repeat_itself_leads_the_report() -> None:
    other, early = find("repeat", "norm.weight", step=1), find("repeat", "embed.weight", step=0)
    first, second, third = diagnose([find("gradient"), early, other], make_inputs(double()))
    assert (first.check, first.tensor, first.code) == ("repeat", "embed.weight", "nondeterminism")
    assert (second.code, second.follows) == ("scale", "")
    assert (third.tensor, third.follows) == ("norm.weight", "embed.weight")


def test_what_repeated_itself_up_to_the_step_where_it_began_does_not_lead() -> None:
    first, second = diagnose(
        [find("gradient"), find("repeat", "embed.weight", step=1)], make_inputs(double())
    )
    assert (first.code, second.check, second.follows) == ("scale", "repeat", first.tensor)


def test_weights_in_each_others_places_lead_what_is_computed_of_them() -> None:
    facts = GatheredFacts(
        module="",
        parameter="embed.weight",
        num_parameters=2,
        num_known=2,
        dtype="float64",
        num_wrong=8,
        num_compared=8,
        is_stale=False,
        sources=((0, 1), (1, 0)),
    )
    loss = Finding(check=CheckName.LOSS, kind="loss", tensor="lm", step=0, rank=0, error=1.0, bound=0.0)
    gathered = Finding(
        check=CheckName.GATHERED_WEIGHTS,
        tensor="embed",
        step=0,
        rank=0,
        error=1.0,
        bound=0.0,
        code=Cause.PERMUTATION,
        facts=facts,
    )
    first, second = diagnose([loss, gathered], DiagnosisInputs())
    assert (first.check, first.follows) == (CheckName.GATHERED_WEIGHTS, "")
    assert second.follows == "embed"
    # Weights with a different error may follow from an earlier one.
    unknown = gathered.model_copy(update={"facts": facts.model_copy(update={"sources": ()}), "code": ""})
    assert diagnose([loss, unknown], DiagnosisInputs())[0].check == CheckName.LOSS


@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_buffer_of_narrow_values_is_a_cause_where_nothing_else_is_wrong(has_gradient: bool) -> None:
    bias = draw(8).to(torch.float32).to(torch.float64) + 2.0**-40
    narrow = bias.to(torch.float32).to(torch.float64)
    tensors = [make_tensor(bias, narrow, narrow, name="router.bias", kind="buffer")]
    findings = [find("buffer", "router.bias")]
    if has_gradient:
        wrong = draw(4, 4, seed=1)
        tensors.append(make_tensor(draw(4, 4), wrong, wrong, name=NAME))
        findings.append(find("gradient"))
    found = diagnose(findings, make_inputs(*tensors))
    causes = {each.tensor: each.code for each in found if not each.follows}
    assert ("rounding" in causes.values()) is not has_gradient
