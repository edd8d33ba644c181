"""Mapping of the reference model's tensors to the tensors of a file: stacked or single, maybe transposed.

Notation: E experts, H hidden, F expert hidden.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moeverify.cases.schema import ReferenceModel
from moeverify.errors import FormatError
from moeverify.model.transformer import Transformer
from moeverify.tools.weights.names import Names

Shape = tuple[int, ...]
Ranges = tuple[range, ...]
Form = Literal["same", "row", "rows", "columns", "half"]


@dataclass(frozen=True)
class MappedTensor:
    """A stored tensor `key` of `shape`, and its relation to one of our tensors.

    - `same`: it is our tensor.
    - `row`: it is index `number` of dim 0 of our tensor.
    - `rows`: it is our (E, F, H) stored as (E * F, H), with `number` = F.
    - `columns`: it is our (E, H, F), with each expert transposed, stored as (E * F, H), with `number` = F.
    - `half`: our (E, F, H) is a half of the stored (E, 2 F, H), which begins at row `number` of each expert.
    """

    key: str
    shape: Shape
    form: Form = "same"
    number: int = 0


@dataclass(frozen=True)
class Window:
    """A box of the stored tensor `key`, and the `target` box of our tensor with the same values.

    With `is_transposed` the last two dims are swapped.
    """

    key: str
    stored: Ranges
    target: Ranges
    is_transposed: bool = False


TensorMapping = Mapping[str, Sequence[MappedTensor]]
"""For each of our tensors, the stored tensors that together contain it."""


def list_tensors(model: ReferenceModel) -> dict[str, Shape]:
    """Return the shapes of all parameters and persistent buffers in model order; tied ones appear once."""
    built = Transformer(model, device="meta")
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict(keep_vars=True).items()}


def map_names(shapes: Mapping[str, Shape], names: Names, format_name: str) -> TensorMapping:
    """Return the mapping of a model's tensors under a table of names; `format_name` names the format in errors.

    Raises: FormatError with the first tensor that the table does not contain.
    """
    mapping: dict[str, tuple[MappedTensor, ...]] = {}
    for name, shape in shapes.items():
        layer = re.search(r"(?<=^layers\.)\d+", name)
        theirs = names.get(re.sub(r"^layers\.\d+", "layers.{layer}", name))
        if theirs is None:
            raise FormatError(f"{format_name} has no name for {name}")
        theirs = theirs.replace("{layer}", layer[0] if layer else "")
        if "{expert}" in theirs:
            mapping[name] = tuple(
                MappedTensor(theirs.replace("{expert}", str(expert)), shape[1:], "row", expert)
                for expert in range(shape[0])
            )
        else:
            mapping[name] = (MappedTensor(theirs, shape),)
    return mapping


def choose_stored(mappings: Sequence[TensorMapping], keys: Collection[str]) -> TensorMapping:
    """Return for each tensor the first mapping whose stored tensors are all among `keys`.

    A tensor for which no mapping fits keeps its first one. Formats may store the same tensor in several ways.
    """
    return {
        name: next(
            (
                each[name]
                for each in mappings
                if name in each and all(mapped.key in keys for mapped in each[name])
            ),
            mappings[0][name],
        )
        for name in mappings[0]
    }


def find_windows(mapping: Sequence[MappedTensor], box: Ranges) -> Iterator[Window]:
    """Yield the windows that together are `box` of our tensor, in the order of its dim 0."""
    form = mapping[0].form
    if form == "same":
        yield Window(mapping[0].key, box, box)
    elif form == "row":
        for mapped in mapping[box[0].start : box[0].stop]:
            yield Window(mapped.key, box[1:], (range(mapped.number, mapped.number + 1), *box[1:]))
    elif form == "half":
        rows = range(box[1].start + mapping[0].number, box[1].stop + mapping[0].number)
        yield Window(mapping[0].key, (box[0], rows, box[2]), box)
    else:
        yield from _cut_stack(mapping[0], box)


def _cut_stack(mapped: MappedTensor, box: Ranges) -> Iterator[Window]:
    is_transposed = mapped.form == "columns"
    experts, first, second = box
    inner, outer = (second, first) if is_transposed else (first, second)
    for expert in experts:
        rows = range(expert * mapped.number + inner.start, expert * mapped.number + inner.stop)
        target = (range(expert, expert + 1), first, second)
        yield Window(mapped.key, (rows, outer), target, is_transposed)
