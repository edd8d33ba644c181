"""Sentences about operations, one function each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch

from moeverify.report.numbers import format_ranks
from moeverify.report.words.factor import (
    describe_amount,
    describe_factor,
    describe_no_count,
    describe_sources,
    format_factor,
    name_products,
)
from moeverify.report.words.layout import describe_reordered
from moeverify.report.words.mistakes import (
    describe_altered,
    describe_loss_scale,
    describe_miscounted,
    describe_misplaced,
    describe_norm_of_slices,
    describe_rounded,
    describe_weights,
)
from moeverify.report.words.part import name_block, name_part, name_some
from moeverify.report.words.subject import MODEL, name_subject
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.initial_values import InitialSource
from moeverify.results.operation import (
    Altered,
    Carried,
    Moved,
    OwnValues,
    RepeatedShard,
    Replaced,
    Rounded,
    Scaled,
    Shifted,
    Stepped,
    Unmoved,
    Unreduced,
    Zeroed,
)
from moeverify.results.part import WHOLE, Contribution
from moeverify.results.upstream import OffUpstream

_OF_MODULES = (Quantity.OUTPUT, Quantity.MODULE_GRADIENT)
_MOST_MOVES = 4
_RIGHT: Mapping[InitialSource, str] = {
    "factory": "those of the model that `recipe.model.factory` makes",
    "weights": "those of the folder of weights",
}


@singledispatch
def describe_operation(operation: object, explanation: Explanation) -> str:
    """Return the sentence for an explanation, dispatched on its operation."""
    raise TypeError(f"there are no words for {type(operation).__name__}")


@describe_operation.register
def _(operation: Scaled, explanation: Explanation) -> str:
    wrong = operation.contributions
    if operation.local_means:
        return describe_weights(operation)
    if any(each.part.group for each in wrong):
        return _describe_parts(wrong, explanation)
    if [each.part for each in wrong] == [WHOLE]:
        alone = f", on {format_ranks(operation.ranks)} alone" if operation.ranks else ""
        return _describe_whole(wrong[0], explanation) + alone
    if all(each.part.tokens is None for each in wrong):
        return _describe_terms(wrong, explanation)
    return _describe_shares(wrong)


def name_module_around(tensors: Sequence[str]) -> str:
    """Return the innermost module that contains all tensors: `layers.2`, or `a part of the model`."""
    paths = [name.split(".")[:-1] for name in tensors]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) if shared and shared != ["layers"] else "a part of the model"


def _describe_shares(wrong: Sequence[Contribution]) -> str:
    """Return which tokens have a wrong weight."""
    names = [name_part(each.part) for each in wrong]
    if all(each.factor.is_zero for each in wrong):
        return f"the share of {name_some(names)} is missing"
    weights = [
        f"{name} by {format_factor(each.factor.value)}" for name, each in zip(names, wrong, strict=True)
    ]
    return f"data shards are weighted incorrectly: {name_some(weights)}"


def _describe_whole(contribution: Contribution, explanation: Explanation) -> str:
    subject, factor = name_subject(explanation.subject), contribution.factor
    if isinstance(explanation.operation, Scaled) and explanation.operation.loss_scale:
        return describe_loss_scale(explanation.operation)
    amount = "zero" if factor.is_zero else describe_amount(factor)
    sources = describe_sources(factor)
    quantity = explanation.subject.quantity
    is_fact = quantity in _OF_MODULES and not sources and not factor.is_zero
    text = f"{subject} {subject.be} {amount}" + (
        f"; {sources}" if sources else f", {describe_no_count(factor.value)}" if is_fact else ""
    )
    if explanation.cause is Cause.METRIC:
        right = "the gradients match" if quantity is Quantity.LOSS else "the choice of experts matches"
        return f"only a reported number is wrong: {text}; {right}"
    if explanation.cause is Cause.NORM and factor.power == 2 and factor.equals and factor.value > 1.0:
        counts = f"{subject} counts all squares {format_factor(factor.value**2)} times"
        equals = describe_sources(factor.model_copy(update={"value": factor.value**2, "power": 1}))
        return f"the gradients match, and {counts}, so {subject} {subject.be} {amount}; {equals}"
    if explanation.cause is Cause.NORM:
        return f"the gradients match, and {text}"
    if quantity is Quantity.UPDATE:
        return f"{text}; {subject.pick('its gradient matches', 'their gradients match')}"
    return text


def _describe_parts(wrong: Sequence[Contribution], explanation: Explanation) -> str:
    """Return the parameter groups whose squares a norm counts wrongly."""
    subject = name_subject(explanation.subject)
    texts = []
    for each in wrong:
        sources = describe_sources(each.factor)
        count = "not at all" if each.factor.is_zero else f"{format_factor(each.factor.value)} times"
        text = f"the gradients match, and {subject} counts the squares of {name_part(each.part)} {count}"
        texts.append(text + (f"; {sources}" if sources else ""))
    return "; ".join(texts)


def _describe_terms(wrong: Sequence[Contribution], explanation: Explanation) -> str:
    parts = []
    for each in wrong:
        factor = describe_factor(each.factor, is_estimate=explanation.is_estimate)
        parts.append(f"the part of the {each.part.term} loss is {factor}")
    return f"in {name_subject(explanation.subject)}, {'; '.join(parts)}"


@describe_operation.register
def _(operation: Unreduced, explanation: Explanation) -> str:
    subject, factor = name_subject(explanation.subject), operation.factor
    total = "the expected value" if factor.is_one else f"{format_factor(factor.value)}x the expected value"
    axes = name_products(operation.axes) or "an unknown axis"
    replicas = f"the {operation.num_replicas} replicas"
    if explanation.subject.quantity is Quantity.GRADIENT_NORM:
        squares = f"the squares of {replicas} sum to the square of the expected value"
        return f"the gradients match, and {subject} is not reduced over {axes}: {squares}"
    return f"{subject} {subject.be} not reduced over {axes}: {replicas} sum to {total}"


@describe_operation.register
def _(operation: Zeroed, explanation: Explanation) -> str:
    subject, quantity = name_subject(explanation.subject), explanation.subject.quantity
    if quantity is Quantity.LOADED:
        lost = f"{subject} {subject.be} on no rank: {subject.pick('it was', 'they were')} dropped"
        return lost if operation.absent else f"{subject} {subject.be} zero"
    if quantity is Quantity.INITIAL_VALUE and operation.absent:
        where = name_module_around(explanation.subject.tensors)
        return f"{subject} {subject.be} on no rank: {where} is missing under this layout"
    if quantity is Quantity.INITIAL_VALUE:
        return f"{subject} {subject.be} all zero: nothing was filled in"
    if quantity is Quantity.MODULE_GRADIENT:
        return f"{subject} {subject.be} exactly zero: it is cut from the graph there"
    holder = subject.pick("the parameter is", "the parameters are")
    if operation.absent:
        return f"{subject} {subject.be} absent: {holder} detached from the loss, or nothing wrote there"
    return f"{subject} {subject.be} exactly zero: {holder} not reached"


@describe_operation.register
def _(operation: Moved, explanation: Explanation) -> str:
    subject = name_subject(explanation.subject)
    have = subject.pick("has", "have")
    if operation.unit == "element":
        return f"{subject} {have} exactly the expected values, in another order"
    moves = ", ".join(f"{to} holds {origin}" for to, origin in operation.moves[:_MOST_MOVES])
    left_out = operation.num_moves - len(operation.moves[:_MOST_MOVES])
    moves += f", and {left_out} more" if left_out > 0 else ""
    if operation.copies:
        return f"{subject} {have} slices along dim {operation.dim} that are copies of others: {moves}"
    return f"{subject} {have} the right values, permuted along dim {operation.dim}: {moves}"


@describe_operation.register
def _(operation: Shifted, explanation: Explanation) -> str:
    direction = "too far along" if operation.offset > 0 else "too early"
    subject = name_subject(explanation.subject)
    places = f"{subject.pick('has', 'have')} the right values in wrong places"
    return f"{subject} {places}: read {abs(operation.offset)} elements {direction}"


@describe_operation.register
def _(operation: Replaced, explanation: Explanation) -> str:
    subject = name_subject(explanation.subject)
    if operation.by == "weights-of-step-before":
        module = explanation.subject.module or MODEL
        return f"{module} computes with the weights of the step before: they were not refreshed"
    if operation.by == "tensor" and not operation.exchanged:
        on = f" on {format_ranks(operation.ranks)}" if operation.ranks else ""
        return f"{subject} {subject.pick('is a copy', 'are copies')} of {operation.tensor}{on}"
    if explanation.subject.quantity in (Quantity.GRADIENT_NORM, Quantity.CLIP_COEFFICIENT):
        return f"the gradients match, and {subject} is that of the step before"
    values = f"{subject.pick('has the values', 'have the values')} {_name_source(operation, explanation)}"
    if operation.by == "value-before-load":
        return f"{subject} {subject.pick('was', 'were')} not loaded on {format_ranks(operation.ranks)}, and {values}"
    return f"{subject} {values}"


def _name_source(operation: Replaced, explanation: Explanation) -> str:
    """Return the source of a tensor's wrong values."""
    if operation.by == "value-before-load":
        return "from before the load"
    if operation.by == "tensor":
        on = f" on {format_ranks(operation.ranks)}" if operation.ranks else ""
        return f"of {operation.tensor}{on}, which was loaded wrong too"
    if explanation.subject.quantity is Quantity.LOADED:
        return "of the step before the one that was saved"
    verb = "counted" if explanation.subject.quantity is Quantity.ROUTING_COUNT else "accumulated"
    return f"of the step before: nothing new was {verb}"


@describe_operation.register
def _(operation: Unmoved, explanation: Explanation) -> str:
    subject, quantity = name_subject(explanation.subject), explanation.subject.quantity
    if quantity is Quantity.UPDATE and operation.unused:
        copies, it = subject.pick("a copy", "copies"), subject.pick("it", "them")
        where = f"{format_ranks(operation.ranks)} {'hold' if len(operation.ranks) > 1 else 'holds'}"
        zero = f"{subject} {subject.be} zero there and {subject.pick('matches', 'match')} elsewhere"
        return f"{where} {copies} that nothing there uses: no gradient comes to {it}, {zero}"
    if quantity is Quantity.UPDATE and operation.ranks:
        match = subject.pick("matches", "match")
        return f"{subject} {subject.be} zero on {format_ranks(operation.ranks)} and {match} elsewhere"
    if quantity is Quantity.UPDATE:
        return f"{subject} {subject.be} zero although {subject.pick('the gradient matches', 'the gradients match')}"
    if operation.ranks:
        return f"{subject} did not change on {format_ranks(operation.ranks)} and matches elsewhere"
    reason = "" if quantity is Quantity.BUFFER else ", although the gradient is not zero"
    return f"{subject} did not change in this step, unlike on one device{reason}"


for _describe in (
    describe_misplaced,
    describe_miscounted,
    describe_norm_of_slices,
    describe_reordered,
):
    describe_operation.register(_describe)  # dispatched on the annotation of its first argument


@describe_operation.register
def _(operation: Rounded, explanation: Explanation) -> str:
    return describe_rounded(operation, explanation)


@describe_operation.register
def _(operation: RepeatedShard, explanation: Explanation) -> str:
    first, second = operation.ranks
    return f"ranks {first} and {second} hold the same values in parts that should differ"


@describe_operation.register
def _(operation: OffUpstream, explanation: Explanation) -> str:
    subject = name_subject(explanation.subject)
    text = f"{subject} {subject.be} {describe_amount(operation.factor)}"
    if operation.is_sure:
        return (
            f"{text}, as the ranks' own gradients give: some of these are wrong by less than is seen of each"
        )
    limit = f"{100.0 * operation.limit:.2g} %"
    return f"{text}; it is not known whether the gradients match: in half of them errors below {limit} are not seen"


@describe_operation.register
def _(operation: OwnValues, explanation: Explanation) -> str:
    if explanation.subject.quantity is Quantity.INITIAL_VALUE:
        replicas = (
            f", other ones than their replicas over {' or '.join(operation.axes)}" if operation.axes else ""
        )
        values = "values that the seed and the name do not give"
        if operation.source != "seed":
            values = f"other values than {_RIGHT[operation.source]}"
        return f"{format_ranks(operation.ranks)} started from {values}{replicas}"
    axes = f", replicas over {', '.join(operation.axes)}," if operation.axes else ""
    return f"{format_ranks(operation.ranks)}{axes} should hold the same values and do not"


@describe_operation.register
def _(operation: Stepped, explanation: Explanation) -> str:
    subject, count = name_subject(explanation.subject), abs(operation.num_steps)
    direction = "too many" if operation.num_steps > 0 else "too few"
    counts = subject.pick("counts", "count")
    return f"{subject} {counts} {count} step{'s' if count > 1 else ''} {direction}"


@describe_operation.register
def _(operation: Carried, explanation: Explanation) -> str:
    subject, block = name_subject(explanation.subject), operation.block
    where = f"{subject} in {name_block(block)}" if block is not None else str(subject)
    where += f" on {format_ranks(operation.ranks)}" if operation.ranks else ""
    if operation.factor is None:
        assert block is not None
        moves = ", ".join(f"{to} with that of {origin}" for to, origin in operation.moves[:_MOST_MOVES])
        left_out = len(block.indices) - len(operation.moves[:_MOST_MOVES])
        moves += f", and {left_out} more" if left_out > 0 else ""
        return f"{where} began the step with the state of other slices along dim {block.dim}: {moves}"
    if operation.factor.is_zero:
        return f"{where} began the step at zero: the state of the previous step was lost"
    sources = describe_sources(operation.factor)
    began = f"began the step with {format_factor(operation.factor.value)}x the state of the previous step"
    return f"{where} {began}" + (f"; {sources}" if sources else "")


@describe_operation.register
def _(operation: Altered, explanation: Explanation) -> str:
    return describe_altered(operation, explanation)
