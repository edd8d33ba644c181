"""The axis of tensor parallelism: its ranks process the same tokens and hold shards of the dense matrices."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.cases.axes.axis import Axis, Divided, Size
from moeverify.cases.rule import blame, own_model, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.results.checks import Kind


@reading("layout.sequence_parallel", "layout.loss_parallel", "layout.tp")
def parts_of_tensor_parallelism(case: Case) -> Iterator[Problem]:
    """Sequence and loss parallelism are parts of tensor parallelism."""
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(case.layout, name) and case.layout.tp == 1:
            yield blame(f"layout.{name}", f"{name} needs tp above 1", f"set tp, or remove {name}")


@reading("layout.tp", "recipe.model.vocab_size")
def rows_of_the_vocabulary(case: Case) -> Iterator[Problem]:
    """Each rank has a row of the vocabulary: with shards of ceil(V / tp) rows the last ones may be empty."""
    model, tp = own_model(case), case.layout.tp
    if model is None:
        return
    rows = -(-model.vocab_size // tp)
    if rows * (tp - 1) >= model.vocab_size:
        num_used = -(-model.vocab_size // rows)
        message = (
            f"recipe.model.vocab_size {model.vocab_size} has rows for {num_used} of {tp} ranks, {rows} each"
        )
        yield blame("layout.tp", message, f"set tp to {num_used}, or a larger vocabulary")


AXIS = Axis(
    name="tp",
    degree="tp",
    size=lambda layout: layout.tp,
    views=lambda _: ("data", "dense", "loss"),
    divides=Divided(
        Kind.INITIAL_WEIGHT, "others", modules=("layers.*.attention", "layers.*.mlp", "layers.*.moe.shared")
    ),
    sizes=(
        Size("model.num_heads", "attention heads"),
        Size("model.num_kv_heads", "key and value heads"),
        Size("model.ffn_hidden", "the width of a dense MLP"),
        Size("model.moe.shared_hidden", "the width of the shared expert"),
    ),
    rules=(parts_of_tensor_parallelism, rows_of_the_vocabulary),
    is_varied=True,
)
