"""Words for a divergence with a known place but no known cause."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.words.subject import MODEL, name_culprit, name_subject
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.operation import Altered


def describe_altered(operation: Altered, explanation: Explanation) -> str:
    """Return where a computation diverges, for an operation whose formula is unknown."""
    subject = explanation.subject
    names = {
        "module": name_culprit(subject),
        "tensors": ", ".join(subject.tensors) or subject.module or MODEL,
        "subject": name_subject(subject),
    }
    if operation.first_micro_batch:
        text = (
            "{module} matches in the first micro-batch and diverges from micro-batch {first} on: something that "
            "changes once a step changed between them"
        )
        return text.format(first=operation.first_micro_batch, **names)
    if subject.quantity is Quantity.MODULE_GRADIENT and subject.tensors:
        return f"first divergence in backward: {name_subject(subject)} (no gradient was right before it)"
    text = _ALTERED_CAUSES.get(explanation.cause) or _ALTERED[subject.quantity]
    if explanation.cause is Cause.METRIC and subject.quantity in _REPORTED:
        text = "only what is reported of {tensors} is wrong: what its block puts out matches"
    if not operation.inputs_seen:
        text = text.replace(_MATCH, _UNSEEN)
    if operation.is_no_number:
        text = text.replace(_DIFFERS, _IS_NO_NUMBER)
    return text.format(**names)


_REPORTED = (Quantity.EXPERT_CHOICE, Quantity.ROUTING_WEIGHT)
_MATCH, _UNSEEN = "inputs match", "inputs are not known to match"
_DIFFERS, _IS_NO_NUMBER = "does not)", "has values that are no numbers)"


_ALTERED_CAUSES: Mapping[Cause, str] = {
    Cause.NONDETERMINISM: "two runs of the same layout differ: something in it is not deterministic",
    Cause.ROUTING: "{tensors} chooses other experts (inputs match)",
    Cause.METRIC: (
        "only a reported number is wrong: {subject} is no multiple of the expected value; the gradients match"
    ),
}
_ALTERED: Mapping[Quantity, str] = {
    Quantity.OUTPUT: "first divergence: {module} (inputs match, output does not)",
    Quantity.MODULE_GRADIENT: (
        "first divergence in backward: {module} (its output gradient matches, what it passes back does not)"
    ),
    Quantity.LOSS: "{subject} is computed differently (routing and module outputs match)",
    Quantity.ROUTING_WEIGHT: "{tensors} weights its choice differently (inputs match)",
    Quantity.BUFFER: "{subject} changed differently than on one device",
    Quantity.LOADED: "{subject} has other values than were saved, and none that are known",
}
