"""Variants of plants: other precisions, seeds, and clean cases from files of cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loader import Plant
from ruamel.yaml import YAML

UNMIXED = (
    "heron.pipe:stages",
    "heron.parallel:expert_fsdp",
    "juniper.fsdp:shard",
    "juniper.pipe:stages",
    "kestrel.pipe:stages",
    "kestrel.zero:grid",
    "linden.pipe:stages",
    "marten.stages:split",
    "osier.parallel:fsdp",
    "osier.pipeline:stages",
    "plover.zero:zero3",
    "teasel.parallel:parallelize",
    "teasel.pipeline:split",
    "wren.passes:stages",
)
"""Functions of stacks that cannot run in mixed precision: they send tensors in the dtype of the parameters, gather
shards that only they refer to, or need a divisor of gradients, which FSDP2 cannot have with another dtype of
reduction under gloo."""

PRECISIONS = ("float64", "float32", "bfloat16", "mixed")


def read_case(path: Path) -> Plant:
    """Return a case file, with the recipes beside it, as a clean case."""
    folder = path.resolve().parent
    case = YAML(typ="safe").load(path)
    name = case.pop("name", path.stem)
    return Plant(name, folder.name, case, precisions=PRECISIONS, recipes=(folder / "recipes",))


def adapt(plant: Plant, precision: str) -> Plant | None:
    """Return a plant for a precision that it need not name, or None if the precision does not apply.

    Scripts have their own dtypes. In mixed precision, stacks that have none of their own run in `mixed`.
    """
    if plant.way == "watch" or (plant.way == "reshard" and precision == "mixed"):
        return None
    layout = dict(plant.case["layout"])
    if precision != "mixed" or plant.precisions == ("mixed",):
        return None if "in_float32" in layout and precision != "mixed" else plant
    if layout.get("parallelize") in UNMIXED:
        return None
    if "parallelize" in layout:
        layout["arguments"] = {"narrows": layout["parallelize"], **layout.get("arguments", {})}
        layout["parallelize"] = "mixed:parallelize"
    elif not {"pp", "data_parallel"}.isdisjoint(layout) or {"dp_replicate", "dp_shard", "cp"}.isdisjoint(
        layout
    ):
        return None
    return replace(plant, case={**plant.case, "layout": layout})


def read_seeds(text: str) -> range:
    """Return the seeds that an option names: 1 to N for `N`, or A to B for `A-B`."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(1, int(first) + 1)


def vary_seed(plant: Plant, seeds: range) -> list[Plant]:
    """Return a plant with each seed of its recipe, or itself if there are no seeds."""
    recipe = plant.case.get("recipe", {})
    base = recipe if isinstance(recipe, dict) else {"base": recipe}
    if not seeds or plant.way == "watch":
        return [plant]
    return [
        replace(plant, id=f"{plant.id}-seed-{seed}", case={**plant.case, "recipe": {**base, "seed": seed}})
        for seed in seeds
    ]
