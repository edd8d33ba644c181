"""The engine: the hypotheses it tries, their order, its choice, and its rivals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from wrong_tensors import (
    AXES,
    PARAMETERS,
    combine,
    draw,
    make_components,
    make_inputs,
    make_tensor,
)

from moeverify.cases.axes.groups import TOKENS, VALID_TOKENS
from moeverify.explain.fitting import engine, hypotheses
from moeverify.explain.fitting.axes import Axes
from moeverify.explain.fitting.engine import explain_tensors
from moeverify.explain.fitting.factors import find_factor
from moeverify.explain.fitting.families import family_of, name_family
from moeverify.explain.fitting.hypotheses import TIERS
from moeverify.explain.fitting.hypotheses.base import Hypothesis, Outcome, Scope, explain_by
from moeverify.explain.fitting.order import ORDER, leaving_out
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor, Product, Source
from moeverify.results.operation import Altered, Unreduced


def test_every_file_of_a_hypothesis_has_its_place_and_its_name() -> None:
    folder = Path(hypotheses.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base", "linear_fit"}
    named = [name for tier in ORDER for name in tier]
    assert sorted(named) == sorted(files)
    assert [hypothesis.name for tier in TIERS for hypothesis in tier] == named


def test_what_a_hypothesis_generalizes_is_tried_before_it() -> None:
    named = [name for tier in ORDER for name in tier]
    for tier in TIERS:
        for hypothesis in tier:
            earlier = named[: named.index(hypothesis.name)]
            assert set(hypothesis.generalizes) <= set(earlier), hypothesis.name


def test_every_quantity_has_a_hypothesis_that_can_be_tested() -> None:
    covered = {quantity for tier in TIERS for hypothesis in tier for quantity in hypothesis.quantities}
    assert covered == set(Quantity)


class Planted(Hypothesis):
    """A hypothesis that explains chosen tensors and records its calls."""

    quantities = frozenset({Quantity.GRADIENT})

    def __init__(
        self,
        name: str,
        explains: Sequence[str] = (),
        *,
        scopes: Sequence[Scope] = (Scope.ALONE,),
        num_coefficients: int = 0,
        generalizes: Sequence[str] = (),
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.generalizes = tuple(generalizes)  # type: ignore[misc]
        self.explains, self._scopes, self._number = set(explains), tuple(scopes), num_coefficients
        self.tested: list[tuple[str, ...]] = []

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return the configured scopes."""
        return self._scopes

    def test(self, tensors: Any, inputs: Any) -> Outcome | None:
        """Explain the tensors if all of them are to be explained."""
        names = tuple(tensor.name for tensor in tensors)
        self.tested.append(names)
        is_explained = set(names) <= self.explains
        if not is_explained:
            return None
        return Outcome(explain_by(Cause.SCALE, Altered(), tensors, inputs), num_coefficients=self._number)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces the real hypotheses."""

    def do(*tiers: Sequence[Planted]) -> None:
        monkeypatch.setattr(engine, "TIERS", tuple(map(tuple, tiers)))

    return do


def gradients(*names: str) -> list[Any]:
    return [make_tensor(draw(4), draw(4, seed=number + 1), name=name) for number, name in enumerate(names)]


def test_what_a_tier_explains_no_later_one_sees(plant: Any) -> None:
    first, second = Planted("first", ["a"]), Planted("second", ["b"])
    plant([first], [second])
    causes = explain_tensors(gradients("a", "b"), make_inputs())
    assert (first.tested, second.tested) == ([("a",), ("b",)], [("b",)])
    assert [cause.tensors[0].name for cause in causes] == ["a", "b"]


def test_what_is_left_out_is_not_tried(plant: Any) -> None:
    first, second = Planted("first", ["a"]), Planted("second", ["a"])
    plant([first], [second])
    (tensor,) = gradients("a")
    with leaving_out(["first"]):
        explain_tensors([tensor], make_inputs())
    assert (first.tested, second.tested) == ([], [("a",)])
    explain_tensors([tensor], make_inputs())
    assert first.tested == [("a",)]


def test_tensors_are_tried_together_then_as_families_then_alone(plant: Any) -> None:
    wide = Planted("wide", ["l.0.w", "l.1.w"], scopes=tuple(Scope))
    plant([wide])
    causes = explain_tensors(gradients("l.0.w", "l.1.w", "head"), make_inputs())
    assert wide.tested == [("l.0.w", "l.1.w", "head"), ("l.0.w", "l.1.w"), ("head",)]
    assert [len(cause.tensors) for cause in causes] == [2, 1]
    assert causes[1].explanation is None


def test_a_single_tensor_is_tried_once(plant: Any) -> None:
    wide, together = Planted("wide", scopes=tuple(Scope)), Planted("together", scopes=(Scope.TOGETHER,))
    plant([wide, together])
    explain_tensors(gradients("a"), make_inputs())
    assert (wide.tested, together.tested) == ([("a",)], [("a",)])


def test_of_two_that_explain_the_one_with_fewer_coefficients_is_chosen_and_the_other_its_rival(
    plant: Any,
) -> None:
    plant([Planted("large", ["a"], num_coefficients=5), Planted("small", ["a"], num_coefficients=2)])
    (cause,) = explain_tensors(gradients("a"), make_inputs())
    assert len(cause.rivals) == 1
    plant([Planted("first", ["a"]), Planted("second", ["a"])])
    (cause,) = explain_tensors(gradients("a"), make_inputs())
    assert len(cause.rivals) == 1


def test_a_generalization_of_what_explains_is_not_tried(plant: Any) -> None:
    simple, wider = Planted("simple", ["a"]), Planted("wider", ["a", "b"], generalizes=["simple"])
    plant([simple, wider])
    explain_tensors(gradients("a", "b"), make_inputs())
    assert wider.tested == [("b",)]


# the real hypotheses, one after another


def test_one_factor_of_all_gradients_is_one_cause_and_the_simplest() -> None:
    components = make_components()
    tensors = combine(components, lambda term, cell: 2.0)
    (cause,) = explain_tensors(tensors, make_inputs(*tensors, components=components))
    assert cause.explanation.cause is Cause.SCALE
    assert cause.explanation.subject.tensors == PARAMETERS
    assert cause.rivals == ()


def test_shares_with_weights_of_their_own_are_one_cause_although_one_tensor_sees_a_single_share() -> None:
    # A parameter that only one rank's tokens reach is wrong by that rank's weight: one factor would explain
    # it alone, and one explanation of all tensors is better than two.
    components = make_components(names=(*PARAMETERS, "layers.0.experts.3"))
    for term in components.parts.values():
        for number, vector in enumerate(term):
            if number:
                vector["layers.0.experts.3"].zero_()
    weights = (0.5, 2.0, 1.0, 1.5)
    tensors = combine(components, lambda term, cell: weights[cell])
    (cause,) = explain_tensors(tensors, make_inputs(*tensors, components=components))
    assert cause.explanation.cause is Cause.SHARE_WEIGHTS
    assert len(cause.tensors) == 3


def test_zeros_are_detached_and_not_zero_times_the_right_value() -> None:
    tensor = make_tensor(draw(8), 0 * draw(8), 0 * draw(8))
    (cause,) = explain_tensors([tensor], make_inputs(tensor))
    assert cause.explanation.cause is Cause.DETACHED
    assert cause.rivals == ()


def test_a_missing_reduction_of_dense_and_expert_tensors_is_one_cause_with_the_fewest_axes() -> None:
    expected, part = draw(4, 3), draw(4, 3, seed=1)
    names = ("layers.0.moe.experts.up", "layers.0.mlp.weight")
    tensors = [make_tensor(expected, part, expected - part, name=name) for name in names]
    axes = Axes(AXES.groups, AXES.sources, lambda axis, tensor: axis != "ep" or "moe" in tensor)
    (cause,) = explain_tensors(tensors, make_inputs(*tensors, axes=axes))
    assert isinstance(cause.explanation.operation, Unreduced)
    assert [product.sources for product in cause.explanation.candidates] == [("dp_replicate",)]
    assert cause.explanation.subject.tensors == names


def test_different_factors_are_different_causes_the_one_of_most_tensors_first() -> None:
    expected = [draw(8, seed=number) for number in range(3)]
    factors = (3.0, 2.0, 2.0)
    tensors = [
        make_tensor(value, factor * value, name=f"w{number}")
        for number, (value, factor) in enumerate(zip(expected, factors, strict=True))
    ]
    causes = explain_tensors(tensors, make_inputs(*tensors))
    found = [[tensor.name for tensor in cause.tensors] for cause in causes]
    assert found == [["w1", "w2"], ["w0"]]


def test_what_nothing_explains_is_one_group_and_comes_last() -> None:
    expected = draw(8)
    tensors = [
        make_tensor(expected, draw(8, seed=5), name="a"),
        make_tensor(expected, draw(8, seed=6), name="b"),
        make_tensor(expected, 2 * expected, name="c"),
    ]
    causes = explain_tensors(tensors, make_inputs(*tensors))
    assert [cause.explanation is None for cause in causes] == [False, True]
    assert [tensor.name for tensor in causes[1].tensors] == ["a", "b"]


def test_state_of_which_nothing_is_known_is_not_joined() -> None:
    tensors = [
        make_tensor(draw(4), draw(4, seed=n + 1), name=f"layers.{n}.bias", kind="buffer") for n in range(2)
    ]
    assert len(explain_tensors(tensors, make_inputs(*tensors))) == 2


# factors and families


@pytest.mark.parametrize(
    ("value", "equals"),
    [
        (2.0, [Product(times=("a",)), Product(times=("b",))]),
        (0.5, [Product(over=("a",)), Product(over=("b",))]),
        (8.0, [Product(times=("c",))]),
        # Two sources are tried when one does not suffice.
        (
            4.0,
            [
                Product(times=("a", "b")),
                Product(times=("c",), over=("a",)),
                Product(times=("c",), over=("b",)),
            ],
        ),
        (1 / 16, [Product(over=("a", "c")), Product(over=("b", "c"))]),
        (1.0, []),
        (-2.0, []),
        (0.0, []),
        (1.7, []),
    ],
)
def test_the_simplest_products_that_equal_a_factor(value: float, equals: list[Product]) -> None:
    sources = [Source(name="a", size=2), Source(name="b", size=2), Source(name="c", size=8)]
    assert list(find_factor(value, sources).equals) == equals


def test_an_inverse_of_one_axis_is_simpler_than_a_ratio_of_two() -> None:
    # pytorch/pytorch #155903: 1/dp_replicate under {dp_replicate: 2, dp_shard: 4} is 2/4 too.
    sources = [Source(name="dp_replicate", size=2), Source(name="dp_shard", size=4)]
    assert find_factor(0.5, sources).equals == (Product(over=("dp_replicate",)),)


def test_axes_that_are_made_of_others_are_not_multiplied_with_them() -> None:
    sources = [Source(name="efsdp", size=2), Source(name="dp_shard", size=4)]
    assert find_factor(8.0, sources).equals == ()
    assert find_factor(0.5, sources).equals == (Product(over=("efsdp",)),)


def test_a_power_of_a_factor_is_compared() -> None:
    factor = find_factor(2.0**0.5, [Source(name="tp", size=2)], power=2)
    assert factor == Factor(value=2.0**0.5, power=2, equals=(Product(times=("tp",)),))


@pytest.mark.parametrize(
    ("value", "equals"),
    [
        (92 / 128, [Product(times=(VALID_TOKENS,), over=(TOKENS,))]),
        (128 / 92, [Product(times=(TOKENS,), over=(VALID_TOKENS,))]),
        (92.0, [Product(times=(VALID_TOKENS,))]),
        (92 / 8, []),
    ],
)
def test_the_share_of_valid_tokens_is_a_factor(value: float, equals: list[Product]) -> None:
    counts = {TOKENS: 128, VALID_TOKENS: 92, "rows of the batch": 8}
    found = find_factor(value, [], counts=[Source(name=name, size=size) for name, size in counts.items()])
    assert list(found.equals) == equals


def test_families() -> None:
    assert family_of("layers.3.moe.experts.up") == family_of("layers.11.moe.experts.up")
    assert family_of("layers.3.up") != family_of("layers.3.down")
    assert name_family(["layers.0.moe.experts.up", "layers.1.moe.experts.down"]) == "expert"
    assert name_family(["layers.0.moe.experts.up", "layers.1.moe.router.weight"]) == ""
    assert name_family(["layers.1.moe.router.weight"]) == "router"
    assert name_family([]) == ""


@pytest.mark.parametrize(
    ("value", "equals"),
    [
        (1 / 8, [Product(over=("pp", "micro-batches")), Product(over=("rows",))]),
        (8.0, [Product(times=("pp", "micro-batches")), Product(times=("rows",))]),
        (2.0, [Product(times=("pp",)), Product(times=("layers",))]),
        (1 / 3, [Product(over=("experts",))]),
        (5.0, []),
    ],
)
def test_counts_of_the_recipe_stand_beside_axes_and_never_hide_them(
    value: float, equals: list[Product]
) -> None:
    sizes, counts = {"pp": 2, "micro-batches": 4}, {"rows": 8, "layers": 2, "experts": 3, "pp": 2}
    found = find_factor(
        value,
        [Source(name=name, size=size) for name, size in sizes.items()],
        counts=[Source(name=name, size=size) for name, size in counts.items()],
    )
    assert list(found.equals) == equals
