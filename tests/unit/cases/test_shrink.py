"""Sizes are reduced until few parameters are left, and only those that matter are changed."""

from __future__ import annotations

from moeverify.cases.shrink import Sizes, shrink

GPT = {"vocab": 50304, "context": 1024, "width": 768, "num_heads": 12, "num_layers": 12, "pad": 50256}


def count_gpt(changes: Sizes) -> int | None:
    """Count the parameters of a transformer whose heads divide its width, for rows of 16 positions."""
    vocab, context, width, heads, layers, _ = ({**GPT, **changes}).values()
    if width % heads or context < 16:
        return None
    return vocab * width + context * width + layers * 12 * width * width


def test_a_small_model_stays_as_it_is() -> None:
    assert shrink(GPT, count_gpt, 10**12) == {}


def test_a_model_becomes_small_and_only_by_what_counts() -> None:
    changes = shrink(GPT, count_gpt, 200_000)
    left = count_gpt(changes)
    assert left is not None
    assert left <= 200_000
    assert {"vocab", "width", "num_layers"} <= set(changes)
    assert "pad" not in changes  # saves nothing
    assert all(value & (value - 1) == 0 for value in changes.values())
    assert changes["width"] >= 32
    assert changes["num_layers"] >= 2


def test_a_token_chooses_few_of_the_experts_that_are_left() -> None:
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "width": 512}

    def count(changes: Sizes) -> int | None:
        experts, chosen, width = ({**sizes, **changes}).values()
        return experts * width * width if chosen <= experts else None

    changes = shrink(sizes, count, 20_000)
    assert (changes["num_experts"], changes["num_experts_per_tok"], changes["width"]) == (16, 2, 32)


def test_sizes_that_belong_together_become_small_beside_one_that_must_stay() -> None:
    sizes = {"width": 1024, "inner": 1024, "kind": 7}

    def count(changes: Sizes) -> int | None:
        width, inner, kind = ({**sizes, **changes}).values()
        return width if width == inner and kind == 7 else None

    assert shrink(sizes, count, 100) == {"width": 64, "inner": 64}


def test_without_anything_to_change_the_model_stays() -> None:
    assert shrink({}, lambda changes: 10**9, 100) == {}
    assert shrink({"width": 512}, lambda changes: 512 if not changes else None, 100) == {}
