"""The cause of a finding as one sentence, its place, and its evidence, one line each.

The sentence comes from the module for the data of the cause:

- `operation`: a formula that explains the numbers, such as a missing reduction; `factor` words its numbers;
- `check` and `data`: facts of a check, such as a stale weight or a wrong batch;
- `culprit`: the first wrong operation;
- `observation`: no cause, and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.words.culprit import describe_culprit, describe_culprit_place, describe_passage
from moeverify.report.words.data import describe_facts
from moeverify.report.words.factor import name_sources
from moeverify.report.words.observation import describe_observation
from moeverify.report.words.operation import describe_operation
from moeverify.report.words.part import name_part, name_some, name_tokens
from moeverify.report.words.subject import MODEL
from moeverify.report.words.wider import describe_wider
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.finding import Finding
from moeverify.results.observation import (
    DiagnosisFailed,
    HiddenByRounding,
    NoValues,
    OtherLosses,
    OtherPasses,
    RightAlike,
    ScalarValues,
)
from moeverify.results.operation import Altered, Moved, OwnValues, RepeatedShard, Replaced, Scaled, Shifted
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


def describe_explanation(explanation: Explanation) -> str:
    """Return an explanation as one sentence."""
    return describe_operation(explanation.operation, explanation)


def leads_with_culprit(finding: Finding) -> bool:
    """Return whether the first wrong operation is the cause of a finding."""
    return finding.culprit is not None and finding.culprit.leads


def describe_cause(finding: Finding) -> str:
    """Return the cause of a finding; empty if not diagnosed, or if another finding explains it."""
    explanation = finding.explanation
    if leads_with_culprit(finding):
        assert finding.culprit is not None
        return describe_culprit(finding.culprit)
    if explanation is None:
        count = len(finding.unexplained)
        which = f"these {format_count(count, 'tensor')}" if count > 1 else "it"
        if count and any(isinstance(seen, OtherPasses) for seen in finding.observations):
            return (
                f"unknown: no hypothesis explains {which}, and the runs put the same rows into other forward passes: "
                "a router's balance loss, expert capacity and batch norm differ with that in a right script too; a "
                "mean over tokens without padding then weights tokens of short rows more, which is an error"
            )
        if count and not any(isinstance(seen, NoValues) for seen in finding.observations):
            return f"unknown: no hypothesis explains {which}{_describe_losses(finding)}"
        return finding.cause or describe_facts(finding.facts, finding).cause
    number = next((seen for seen in finding.observations if isinstance(seen, ScalarValues)), None)
    is_state = explanation.subject.quantity is Quantity.LOADED and isinstance(explanation.operation, Altered)
    if is_state and number is not None:
        return f"it is {number.actual:.10g}, and {number.expected:.10g} was saved"
    doubts = [describe_observation(seen) for seen in finding.observations if isinstance(seen, RightAlike)]
    sentence = describe_explanation(explanation)
    # An axis whose other gradients match may equal the factor by coincidence; the sentence mentions that.
    return f"{sentence}; not confirmed, {doubts[0]}" if doubts else sentence


def _describe_losses(finding: Finding) -> str:
    """Return the part of a step that the losses of two runs blame for an unknown cause; empty if unknown."""
    seen = next((each for each in finding.observations if isinstance(each, OtherLosses)), None)
    if seen is None:
        return ""
    if not seen.differ:
        return "; rows, weights and losses are equal, so it is in the backward pass or in a reduction of gradients"
    if seen.rank is not None:
        return (
            "; rows and weights are equal, but the loss is not: the forward pass or its random numbers differ"
        )
    return (
        "; rows and weights are equal, but the loss is not: the forward pass or its random numbers differ, or the "
        "loss is a mean over another number of tokens"
    )


def describe_where(finding: Finding) -> str:
    """Return the place where the cause of a finding acts."""
    if finding.culprit is not None and leads_with_culprit(finding):
        return describe_culprit_place(finding.culprit)
    place = describe_place(finding.explanation) if finding.explanation is not None else ""
    place = place or finding.where or describe_facts(finding.facts, finding).where
    site = finding.sites[0].site if finding.sites else ""
    if not site or site in place:
        return place
    return f"{place}, {site}" if place else site


def describe_evidence(finding: Finding) -> tuple[str, ...]:
    """Return the measurements behind a finding, one line each, starting with the check's own evidence."""
    # A note that rounding may hide causes is redundant if the case also ran in wider precisions.
    left_out = (DiagnosisFailed, HiddenByRounding) if finding.wider else (DiagnosisFailed,)
    lines = [*describe_wider(finding)]
    if leads_with_culprit(finding):
        lines += [describe_explanation(finding.explanation)] if finding.explanation is not None else []
    elif finding.culprit is not None and finding.culprit.ranks:
        lines.append(describe_passage(finding.culprit))
    elif finding.culprit is not None and finding.culprit.absent:
        slices = [f"[{first}:{stop}] of dim {dim}" for dim, first, stop in finding.culprit.absent]
        lines.append(f"no rank holds {', '.join(slices)}")
    lines += [
        *describe_facts(finding.facts, finding).evidence,
        *([", ".join(f"{each.name}: {each.site}" for each in finding.sites)] if finding.sites else ()),
        *(describe_observation(seen) for seen in finding.observations if not isinstance(seen, left_out)),
    ]
    # A finding read from a file already has these lines.
    return (*(line for line in finding.evidence if line not in lines), *lines)


def describe_failures(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """Return one line for each diagnosis that failed."""
    return tuple(
        describe_observation(seen)
        for finding in findings
        for seen in finding.observations
        if isinstance(seen, DiagnosisFailed)
    )
