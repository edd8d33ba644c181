"""Plants of the draws in a precision that they do not name, with seeds, and cases of other files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

variants: Any = import_module("variants")


def make_plant(layout: dict[str, Any], **fields: Any) -> Any:
    return variants.Plant("p1", "heron", {"recipe": "small", "layout": layout}, **fields)


def test_a_stack_without_mixed_precision_gets_it_around_its_own_function() -> None:
    layout = {"dp_shard": 2, "parallelize": "heron.parallel:parallelize", "arguments": {"mode": "wrong"}}
    changed = variants.adapt(make_plant(layout), "mixed")
    assert changed is not None
    assert changed.case["layout"] == {
        "dp_shard": 2,
        "parallelize": "mixed:parallelize",
        "arguments": {"narrows": "heron.parallel:parallelize", "mode": "wrong"},
    }
    assert layout["parallelize"] == "heron.parallel:parallelize"


@pytest.mark.parametrize(
    ("layout", "fields", "precision"),
    [
        ({"parallelize": "heron.parallel:parallelize"}, {"precisions": ("mixed",)}, "mixed"),
        ({"parallelize": "heron.parallel:parallelize"}, {}, "bfloat16"),
        ({"dp_shard": 2}, {}, "mixed"),
    ],
)
def test_plants_to_which_a_precision_applies_as_they_are(
    layout: dict[str, Any], fields: dict[str, Any], precision: str
) -> None:
    plant = make_plant(layout, **fields)
    changed = variants.adapt(plant, precision)
    assert changed is not None
    assert changed.case == plant.case


@pytest.mark.parametrize(
    ("layout", "fields", "precision"),
    [
        ({"dp_shard": 2}, {"way": "watch"}, "bfloat16"),
        ({"dp_shard": 2}, {"way": "reshard"}, "mixed"),
        ({"tp": 2}, {}, "mixed"),
        ({"dp_shard": 2, "pp": 2}, {}, "mixed"),
        ({"parallelize": "heron.pipe:stages"}, {}, "mixed"),
        ({"parallelize": "x:y", "in_float32": ["norm"]}, {"precisions": ("mixed",)}, "bfloat16"),
    ],
)
def test_plants_to_which_a_precision_does_not_apply(
    layout: dict[str, Any], fields: dict[str, Any], precision: str
) -> None:
    assert variants.adapt(make_plant(layout, **fields), precision) is None


def test_each_seed_is_a_plant_of_its_own() -> None:
    first, second = variants.vary_seed(make_plant({"dp_shard": 2}), range(1, 3))
    assert (first.id, second.id) == ("p1-seed-1", "p1-seed-2")
    assert second.case["recipe"] == {"base": "small", "seed": 2}
    assert variants.vary_seed(first, range(0)) == [first]
    assert variants.vary_seed(second, range(1, 2))[0].case["recipe"] == {"base": "small", "seed": 1}


def test_seeds_are_a_number_or_a_range() -> None:
    assert list(variants.read_seeds("3")) == [1, 2, 3]
    assert list(variants.read_seeds("11-13")) == [11, 12, 13]


def test_a_case_of_a_file_is_a_clean_plant_with_the_recipes_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "stack" / "tp.yaml"
    path.parent.mkdir()
    path.write_text("name: my-tp\nrecipe: small\nlayout: {tp: 2}\n")
    plant = variants.read_case(path)
    assert (plant.id, plant.stack) == ("my-tp", "stack")
    assert plant.case == {"recipe": "small", "layout": {"tp": 2}}
    assert plant.recipes == (tmp_path / "stack" / "recipes",)
