"""Parameters of two ranks with equal random values: copies of a layer, and equal values that are right."""

from __future__ import annotations

from moeverify.scripts.record.siblings import Parts, find_siblings, repeats_siblings


def make(*parts: tuple[str, int]) -> Parts:
    return {name: ((4, 4), bits) for name, bits in parts}


FIRST = make(("layers.0.up", 1), ("layers.0.down", 2))


def test_layers_of_two_stages_that_are_equal_are_copies() -> None:
    second = make(("layers.1.up", 1), ("layers.1.down", 2))
    pairs = {"layers.1.up": "layers.0.up", "layers.1.down": "layers.0.down"}
    assert find_siblings(FIRST, second, is_apart=False) == pairs


def test_equal_names_are_copies_on_different_stages_only() -> None:
    assert not find_siblings(FIRST, FIRST, is_apart=False)
    assert len(find_siblings(FIRST, FIRST, is_apart=True)) == 2


def test_other_names_and_few_equal_values_are_no_copies() -> None:
    tied = make(("head.weight", 1))
    assert not find_siblings(make(("embed.weight", 1)), tied, is_apart=False)
    patterned = make(("layers.1.up", 5), ("layers.1.down", 6), ("layers.1.decay", 9))
    assert not find_siblings({**FIRST, **make(("layers.0.decay", 9))}, patterned, is_apart=False)
    both = make(("layers.0.up", 1), ("layers.1.up", 1))
    assert not find_siblings(both, both, is_apart=False)  # replicas of a model that copies a layer
    assert repeats_siblings(both)
    assert not repeats_siblings(FIRST)
