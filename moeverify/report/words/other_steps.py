"""Steps that ranks make otherwise, in words: `without softmax(the result of masked_fill, -1) at attention.py:40`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moeverify.report.numbers import format_ranks
from moeverify.report.words.subject import name_subject
from moeverify.results.explanation import Explanation
from moeverify.results.other_steps import OtherStep, OtherSteps, Term

_PLAIN = {"mm": "matmul", "bmm": "matmul", "baddbmm": "add_matmul", "addmm": "add_matmul", "_to_copy": "cast"}
_MOST_TAKEN = 4
_BEFORE = "a tensor from before the step"


def describe_other_steps(operation: OtherSteps, explanation: Explanation) -> str:
    """Return which steps ranks make otherwise; all others are those of one device."""
    steps = ", and ".join(f"{_WORDS[step.way](step)}{_on(step.ranks)}" for step in operation.steps)
    subject = name_subject(explanation.subject)
    return f"{subject} {'are' if subject.is_plural else 'is'} made as on one device, but {steps}"


def _describe_number(step: OtherStep) -> str:
    right, wrong = _both(step)
    pairs = list(zip(wrong.options, right.options, strict=False))
    other = [(one, two) for one, two in pairs if one != two] or pairs
    numbers = " and ".join(f"{one} in place of {two}" for one, two in other)
    return f"with {numbers} in {_name_operator(right)}{_at(wrong) or _at(right)}"


def _describe_function(step: OtherStep) -> str:
    right, wrong = _both(step)
    return f"with {_name_operator(wrong)}{_at(wrong)} in place of {_name_operator(right)}{_at(right)}"


def _describe_order(step: OtherStep) -> str:
    right, wrong = _both(step)
    name = _name_inner(right) if right.args else _name_operator(right)
    where = f"{name}{_at(wrong) or _at(right)}"
    return f"with other elements brought together in {where}, of the same values"


def _describe_index(step: OtherStep) -> str:
    assert step.wrong is not None
    return f"with other rows taken in {_name_operator(step.wrong)}{_at(step.wrong)}"


def _describe_other(step: OtherStep) -> str:
    right, wrong = _both(step)
    times = f", {step.factor:.6g} times the right one" if step.factor is not None else ""
    return f"with {_name(wrong)} in place of {_name(right)}{times}"


def _describe_left_out(step: OtherStep) -> str:
    assert step.right is not None
    return f"without {_name(step.right)}"


def _describe_added(step: OtherStep) -> str:
    assert step.wrong is not None
    return f"with a further {_name(step.wrong)}"


_WORDS: Mapping[str, Callable[[OtherStep], str]] = {
    "number": _describe_number,
    "function": _describe_function,
    "order": _describe_order,
    "index": _describe_index,
    "operand": _describe_other,
    "other": _describe_other,
    "left-out": _describe_left_out,
    "added": _describe_added,
}


def _both(step: OtherStep) -> tuple[Term, Term]:
    assert step.right is not None
    assert step.wrong is not None
    return step.right, step.wrong


def _name(term: Term) -> str:
    """Return a tensor by what made it, with the line of the outermost operator."""
    return f"{_name_inner(term)}{_at(term)}" if term.operator and term.args else _name_inner(term)


def _name_inner(term: Term) -> str:
    if term.module is not None:
        what = f"the {term.end} {f'`{term.slot}` ' if term.slot else ''}of {term.module or 'the model'}"
        return f"the gradient of {what}" if term.is_gradient else what
    if not term.operator:
        return term.name or _BEFORE
    numbers = ", ".join(term.options)
    if not term.args:
        return f"the result of {_name_operator(term)}{f'({numbers})' if numbers else ''}{_at(term)}"
    taken = list(map(_name_inner, term.args))
    if len(taken) > _MOST_TAKEN:
        taken = [taken[0], f"and {len(taken) - 1} more"]
    inner = [*taken, *([numbers] if numbers else [])]
    return f"{_name_operator(term)}({', '.join(inner)})"


def _name_operator(term: Term) -> str:
    return _PLAIN.get(term.operator, term.operator.strip("_")) if term.operator else _name_inner(term)


def _on(ranks: Sequence[int]) -> str:
    return f" on {format_ranks(ranks)} alone" if ranks else ""


def _at(term: Term) -> str:
    return f" at {term.line}" if term.line else ""
