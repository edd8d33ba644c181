"""The affected part of an optimizer finding when others of the same step are wrong differently."""

from __future__ import annotations

from dataclasses import replace

from wrong_tensors import draw, make_inputs, make_tensor

from moeverify.explain.fitting.affected import name_parts
from moeverify.parallel.regions.region import Region
from moeverify.report.words.parameter_part import describe_part
from moeverify.results.cause import Cause
from moeverify.results.finding import Finding
from moeverify.results.step_facts import RecomputedFacts, TermFacts

PARTS = ("norm", "q_proj", "k_proj", "o_proj", "up", "down")
NAMES = [
    "embed.weight",
    *(f"layers.{layer}.{part}.weight" for layer in range(3) for part in PARTS),
    "head.weight",
]


def make_update(name: str, factor: float, follows: str = "") -> Finding:
    terms = (TermFacts(name="step", expected=-0.01, found=-0.01 * factor),)
    return Finding(
        check="optimizer step",
        kind="update",
        tensor=name,
        step=0,
        rank=0,
        error=1.0,
        bound=0.01,
        code=Cause.OPTIMIZER,
        facts=RecomputedFacts(terms=terms),
        follows=follows,
    )


def list_layer(layer: int, factor: float) -> list[Finding]:
    names = [name for name in NAMES if name.startswith(f"layers.{layer}.")]
    return [make_update(names[0], factor), *(make_update(name, factor, names[0]) for name in names[1:])]


def describe(findings: list[Finding]) -> list[str]:
    regions = {name: {0: Region.whole((8, 8))} for name in NAMES}
    inputs = replace(make_inputs(make_tensor(draw(8, 8), draw(8, 8), name=NAMES[0])), regions=regions)
    found = name_parts(findings, inputs)
    return ["" if each.part is None else describe_part(each.part) for each in found if not each.follows]


def test_a_rate_of_its_own_in_each_layer_is_said_of_that_layer() -> None:
    said = describe([*list_layer(0, 0.81), *list_layer(1, 0.9)])
    assert said == [
        f"it is so of all 6 parameters in layer {layer}, and seen in no others of 20" for layer in (0, 1)
    ]


def test_no_part_is_said_where_others_may_be_affected_that_are_not_in_it() -> None:
    unknown = [each.model_copy(update={"facts": RecomputedFacts(terms=())}) for each in list_layer(1, 0.9)]
    assert describe([*list_layer(0, 0.81), *unknown])[0] == ""
    # One is enough, whether it stands alone or follows from another one that nobody knows.
    assert describe([*list_layer(0, 0.81), unknown[0]])[0] == ""
    later = [each.model_copy(update={"step": 1}) for each in unknown]
    assert "all 6 parameters in layer 0" in describe([*list_layer(0, 0.81), *later])[0]


def hide(findings: list[Finding], count: int) -> list[Finding]:
    """Return a layer's findings; the last `count` have an unknown error."""
    unknown = [each.model_copy(update={"facts": RecomputedFacts(terms=())}) for each in findings[-count:]]
    return [*findings[:-count], *(each.model_copy(update={"follows": ""}) for each in unknown)]


def test_parameters_of_a_part_in_which_it_could_not_be_seen_are_counted() -> None:
    said = describe(hide(list_layer(1, 0.9), 2))[0]
    assert said == (
        "it is so of 4 of the 6 parameters in layer 1, could not be seen in the other 2, "
        "and is seen in no others of 20"
    )


def test_half_of_a_part_is_none() -> None:
    assert describe(hide(list_layer(1, 0.9), 3))[0] == ""


def test_what_is_wrong_in_another_way_is_in_no_part() -> None:
    """Two tensors of the layer have another factor, so the other tensors are not the whole layer."""
    layer = list_layer(1, 0.9)
    apart = [make_update(layer[-1].tensor, 0.5), make_update(layer[-2].tensor, 0.5, layer[-1].tensor)]
    assert "6 parameters" not in describe([*layer[:-2], *apart])[0]
