"""The affected part of the parameters: simple traits that all of them share and no others do, or nothing."""

from __future__ import annotations

import random

import pytest

from moeverify.explain.fitting.parameter_parts import find_part
from moeverify.parallel.regions.region import Region
from moeverify.report.words.parameter_part import describe_part

_SHAPES = {
    "attention_norm": (8,),
    "q_proj": (8, 8),
    "o_proj": (8, 8),
    "mlp_norm": (8,),
    "up": (32, 8),
    "down": (8, 32),
}
NAMES = [
    "embed.weight",
    *(f"layers.{layer}.{part}.weight" for layer in range(4) for part in _SHAPES),
    "norm.weight",
    "head.weight",
]
GROUPS = {"tp": [[0, 1]]}


def make_regions() -> dict[str, dict[int, Region]]:
    """Return the regions of a model whose `up` is sharded over tp, and whose last half is on rank 1 alone."""
    found = {}
    for name in NAMES:
        shape = _SHAPES.get(name.split(".")[-2], (64, 8) if "norm" not in name else (8,))
        whole = Region.whole(shape)
        if ".up." in name:
            halves = [Region.box(shape, [range(16 * rank, 16 * rank + 16), range(8)]) for rank in range(2)]
            found[name] = dict(enumerate(halves))
        else:
            found[name] = {0: whole, 1: whole}
    return found


REGIONS = make_regions()


def describe(affected: list[str], unaffected: list[str] | None = None) -> str:
    others = [name for name in NAMES if name not in affected] if unaffected is None else unaffected
    part = find_part(affected, others, REGIONS, GROUPS)
    return "" if part is None else describe_part(part)


@pytest.mark.parametrize(
    ("affected", "words"),
    [
        (
            [name for name in NAMES if "norm" in name],
            "parameters of 1 dim, or with norm in their names, and seen in no others of 27",
        ),
        ([name for name in NAMES if "up" in name.split(".")], "with up in their names"),
        ([name for name in NAMES if name.startswith(("layers.1.", "layers.2."))], "in layers 1, 2"),
        (NAMES[13:], "from layers.2.attention_norm.weight on in the order of the model"),
        (NAMES[:13], "before layers.2.attention_norm.weight in the order of the model"),
        (NAMES[1::2], "at odd places in the order of the model"),
        (
            [name for name in NAMES if "norm" not in name and name.startswith("layers.3.")],
            "of 2 dims in layer 3",
        ),
    ],
)
def test_the_simplest_traits_of_exactly_these_are_said(affected: list[str], words: str) -> None:
    assert words in describe(affected)


def test_a_part_that_is_cut_over_an_axis_is_said_where_no_name_tells_it() -> None:
    regions = {f"p{n}": REGIONS["layers.0.up.weight" if n % 3 else "head.weight"] for n in range(24)}
    affected = [name for name, held in regions.items() if held is REGIONS["layers.0.up.weight"]]
    part = find_part(affected, [name for name in regions if name not in affected], regions, GROUPS)
    assert part is not None
    assert [trait.kind for trait in part.traits] in (["sharded"], ["smaller"])


def test_what_is_not_known_of_others_does_not_matter() -> None:
    norms = [name for name in NAMES if "norm" in name]
    others = [name for name in NAMES if "norm" not in name]
    assert "with norm in their names" in describe(norms[:-1], others)


def test_all_parameters_and_single_ones_are_no_part() -> None:
    assert describe(NAMES) == ""
    assert describe([NAMES[3]]) == ""


@pytest.mark.parametrize("count", [2, 3, 5, 9, 13])
def test_of_parameters_that_are_drawn_by_lot_hardly_any_are_said_to_be_a_part(count: int) -> None:
    draw = random.Random(count)
    told = sum(bool(describe(draw.sample(NAMES, count))) for _ in range(200))
    assert told <= 4
