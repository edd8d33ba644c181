"""The place of an explanation in words: `axis ep, efsdp`, `layers.2.moe, axis tp`, `balance loss`."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.numbers import format_ranks
from moeverify.report.words.factor import name_sources
from moeverify.report.words.part import name_part, name_some, name_tokens
from moeverify.report.words.subject import MODEL
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.operation import (
    Moved,
    OwnValues,
    RepeatedShard,
    Replaced,
    Scaled,
    Shifted,
)
from moeverify.results.part import WHOLE, Part

_STAGES: Mapping[Quantity, str] = {
    Quantity.GRADIENT_NORM: "gradient norm",
    Quantity.CLIP_COEFFICIENT: "gradient norm",
    Quantity.UPDATE: "optimizer step",
    Quantity.OPTIMIZER_STATE: "optimizer step",
}


def describe_place(explanation: Explanation) -> str:
    """Return where an explanation acts; empty if the place is just the tensor."""
    subject, operation = explanation.subject, explanation.operation
    words = [_STAGES.get(subject.quantity, "")]
    is_of_loss = subject.quantity is Quantity.MODULE_GRADIENT and bool(subject.tensors)
    if subject.module or (subject.quantity in (Quantity.OUTPUT, Quantity.MODULE_GRADIENT) and not is_of_loss):
        words.append(subject.module or MODEL)
    if subject.quantity is Quantity.LOSS or is_of_loss:
        words.append(f"{' and '.join(subject.tensors)} loss")
    if isinstance(operation, Scaled):
        words.append("denominators" if operation.local_means else _name_parts(operation))
        words.append(format_ranks(operation.ranks) if operation.ranks else "")
    elif isinstance(operation, Moved):
        words.append("" if operation.dim is None else f"dim {operation.dim}")
    elif isinstance(operation, Replaced):
        words += [operation.tensor, format_ranks(operation.ranks) if operation.ranks else ""]
    elif isinstance(operation, OwnValues):
        words.append(
            f"replicas over {', '.join(operation.axes)}" if operation.axes else format_ranks(operation.ranks)
        )
    elif isinstance(operation, RepeatedShard):
        words.append(format_ranks(operation.ranks))
    elif isinstance(operation, Shifted):
        words.append(format_ranks([operation.rank]))
    sources = dict.fromkeys(source for product in explanation.candidates for source in product.sources)
    words.append(name_sources(list(sources)))
    return ", ".join(filter(None, words))


def _name_parts(operation: Scaled) -> str:
    parts = [each.part for each in operation.contributions if each.part != WHOLE]
    return name_some(list(dict.fromkeys(map(_name, parts))))


def _name(part: Part) -> str:
    if part.tokens is None:
        return f"{part.term} loss" if part.term else name_part(part)
    return name_part(part) if part.term else name_tokens(part.tokens)
