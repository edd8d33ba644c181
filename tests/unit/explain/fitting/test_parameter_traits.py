"""The affected part of the parameters: named if it is simple and exact, and not by chance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from moeverify.explain.fitting.parameter_parts import find_part
from moeverify.parallel.regions.region import Region
from moeverify.report.words.parameter_part import describe_part
from moeverify.results.parameter_part import ParameterPart


def make_regions() -> dict[str, dict[int, Region]]:
    """Return four layers on two ranks: matrices are sharded by rows, vectors are replicated."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (32, 8)}
    for layer in range(4):
        block = f"layers.{layer}"
        shapes |= {f"{block}.attention_norm.weight": (8,), f"{block}.attention.q_proj.weight": (8, 8)}
        shapes |= {f"{block}.attention.q_proj.bias": (8,), f"{block}.attention.o_proj.weight": (8, 8)}
        shapes |= {f"{block}.ffn_norm.weight": (8,), f"{block}.moe.router.weight": (4, 8)}
        shapes |= {f"{block}.moe.experts.up_proj": (4, 8, 8), f"{block}.moe.experts.down_proj": (4, 8, 8)}
    shapes |= {"norm.weight": (8,), "lm_head.weight": (32, 8)}
    return {name: _place(shape) for name, shape in shapes.items()}


def _place(shape: tuple[int, ...]) -> dict[int, Region]:
    if len(shape) == 1:
        return dict.fromkeys((0, 1), Region.whole(shape))
    half, rest = shape[0] // 2, [range(size) for size in shape[1:]]
    rows = (range(half), range(half, shape[0]))
    return {rank: Region.box(shape, (rows[rank], *rest)) for rank in (0, 1)}


REGIONS = make_regions()
NAMES = list(REGIONS)
GROUPS = {"dp_shard": [[0, 1]]}


def look(is_affected: Callable[[str], bool]) -> ParameterPart | None:
    affected = [name for name in NAMES if is_affected(name)]
    return find_part(affected, [name for name in NAMES if name not in affected], REGIONS, GROUPS)


@pytest.mark.parametrize(
    ("is_affected", "said"),
    [
        (lambda name: "experts" in name, "with experts in their names"),
        (lambda name: "norm" in name, "all 9 parameters with norm in their names"),
        (lambda name: len(REGIONS[name][0].shape) == 1, "all 13 parameters of 1 dim"),
        (lambda name: len(REGIONS[name][0].shape) == 3, "with experts in their names"),
        (lambda name: len(REGIONS[name][0].shape) > 1, "all 22 parameters sharded over dp_shard"),
        (lambda name: "layers.2" in name or "layers.3" in name, "all 16 parameters in layers 2, 3"),
        (
            lambda name: NAMES.index(name) >= 17,
            f"all 18 parameters from {NAMES[17]} on in the order of the model",
        ),
        (lambda name: NAMES.index(name) < 9, f"all 9 parameters before {NAMES[9]} in the order of the model"),
        (
            lambda name: NAMES.index(name) >= 17 and "experts" not in name,
            f"without a part `experts` in their names from {NAMES[17]} on in the order of the model",
        ),
        (
            lambda name: "q_proj" in name and "layers.0" not in name,
            "with q_proj in their names in layers 1-3",
        ),
        (lambda name: NAMES.index(name) % 2 == 1, "at odd places in the order of the model"),
    ],
)
def test_the_simplest_exact_part_is_named(is_affected: Callable[[str], bool], said: str) -> None:
    part = look(is_affected)
    assert part is not None
    assert said in describe_part(part)


def test_one_unaffected_tensor_more_is_no_part() -> None:
    assert look(lambda name: "experts" in name and name != "layers.2.moe.experts.up_proj") is None


def test_parts_of_chance_are_not_named() -> None:
    """A description of sufficient length exists for any set."""
    generator, named = random.Random(0), 0
    for _ in range(300):
        chosen = set(generator.sample(NAMES, generator.randint(1, len(NAMES) - 1)))
        named += look(chosen.__contains__) is not None
    assert named <= 3
