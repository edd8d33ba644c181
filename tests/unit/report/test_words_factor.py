"""Names of factors, of equal products, and of the scaled parts."""

from __future__ import annotations

import pytest

from moeverify.cases.axes.groups import list_degrees, list_groups, list_loss_counts
from moeverify.cases.axes.registry import AXIS_OF
from moeverify.faults.setting import make_case
from moeverify.report.words.factor import describe_factor, format_factor, name_product, name_sources
from moeverify.report.words.part import name_part
from moeverify.results.factor import Factor, Product
from moeverify.results.part import WHOLE, Part, Tokens
from moeverify.scripts.compare.explain import MICRO_BATCHES, RANKS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0, "2"),
        (2.0000000001, "2"),
        (1.0000001, "1.0000001"),
        (0.99999999, "0.99999999"),
        (1.0 + 2**-52, "1.0000000000000002"),
        (1.0, "1"),
        (1 / 3, "0.333333"),
    ],
)
def test_a_wrong_factor_is_never_printed_as_1(value: float, text: str) -> None:
    assert format_factor(value) == text


def test_factors() -> None:
    assert describe_factor(Factor(value=1.0 + 3e-8)) == "1.00000003x too large"
    assert describe_factor(Factor(value=-1.0)) == "-1x the expected value"
    assert {describe_factor(Factor(value=float(value))) for value in ("nan", "inf", "-inf")} == {"no number"}
    assert (
        describe_factor(Factor(value=4.0, equals=(Product(times=("ep", "cp")),)))
        == "4x too large; 4 = ep * cp"
    )


@pytest.mark.parametrize(
    ("product", "name"),
    [
        (Product(times=("ep", "cp")), "ep * cp"),
        (Product(over=("ep",)), "1/ep"),
        (Product(times=("ep",), over=("cp",)), "ep/cp"),
        (Product(over=("ep", "cp")), "1/(ep * cp)"),
    ],
)
def test_products(product: Product, name: str) -> None:
    assert name_product(product) == name


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (WHOLE, "golden"),
        (Part(term="lm"), "lm"),
        (Part(tokens=Tokens()), "the whole batch"),
        (Part(tokens=Tokens(data_rank=0, context_rank=1, micro_batch=2)), "dp 0, cp 1, micro-batch 2"),
        (Part(term="lm", tokens=Tokens(micro_batch=1)), "lm of micro-batch 1"),
    ],
)
def test_parts(part: Part, name: str) -> None:
    assert name_part(part) == name


def test_a_mesh_axis_alone_is_called_an_axis() -> None:
    cases = [
        make_case("tied", preset="stress-tied", dp_shard=2, cp=2, tp=2, ep=4, micro_batches=2),
        make_case("placed", dp_replicate=3, dp_shard=2, cp=2, tp=2, ep=4, etp=2, micro_batches=2),
        make_case("stages", pp=2, dp_shard=2, ep=2, micro_batches=4, stage_layers=(2, 1)),
    ]
    names = {RANKS, MICRO_BATCHES}
    for case in cases:
        names |= {*list_degrees(case), *list_groups(case), *list_loss_counts(case)}
    axes = names & set(AXIS_OF)
    assert axes == {"dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "efsdp", "fsdp"}
    assert len(names - axes) == 11
    assert {name for name in names if name_sources([name]).startswith("axis ")} == axes
    assert name_sources(["micro-batches", "ep", "pp"]) == "axis ep, pp, number of micro-batches"
