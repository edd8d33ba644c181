"""Sentences about the findings of a guarded run. Importing it extends `describe_facts`."""

from __future__ import annotations

from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.words.check import Words
from moeverify.report.words.factor import format_factor
from moeverify.report.words.script import describe_facts, list_names
from moeverify.results.finding import Finding
from moeverify.results.guard import (
    AlikeFacts,
    DriftCause,
    DriftFacts,
    NonfiniteFacts,
    OwnNormFacts,
    SameWorkFacts,
    TokenFacts,
)


@describe_facts.register
def _(facts: DriftFacts, finding: Finding) -> Words:
    tensors, ranks = format_count(len(facts.names), "tensor"), format_ranks(finding.ranks)
    if facts.cause is not None and facts.cause.kind == "overwrite":
        source = format_ranks(facts.cause.ranks)
        cause = (
            f"after each step {tensors} of {source} replace those of the other ranks, whose gradients differ and are "
            "not reduced: their rows have no effect"
        )
        return Words(cause, "weights", (list_names(facts.names),))
    evidence = (f"{list_names(facts.names)}: they differ by up to {facts.distance:.2g} of their norm",)
    if facts.since == "start" and facts.gradients == "differ":
        cause = (
            f"{tensors} began with other values on {ranks} and get other gradients there, although these ranks "
            "are data-parallel and exchange nothing in the forward pass: neither broadcast nor reduced (does "
            "DistributedDataParallel ignore them?)"
        )
        return Words(cause, "", evidence)
    if facts.since == "start":
        cause = (
            f"{tensors} began with other values on {ranks}, although their gradients are equal bit for bit: these "
            "replicas were seeded differently, or not broadcast"
        )
        return Words(cause, "initial values", evidence)
    where = ""
    if facts.cause is not None:
        gradients, where = _describe_cause(facts.cause)
    else:
        gradients = {
            "equal": "their gradients are equal, so the states of their optimizers differ, or a step that was not "
            "sampled changed them",
            "differ": f"their gradients differ: they are not reduced over {_describe_groups(facts)}",
            "clipped apart": "their gradients have equal norms before the clip and not after it: ranks clip "
            "differently",
            "unknown": "whether their gradients are equal is not known",
        }[facts.gradients]
    if facts.are_experts and facts.cause is None:
        cause = (
            f"{tensors} of experts began with the same values on {ranks} and were updated differently: different "
            f"experts that should begin with different values, or replicas of one; {gradients}"
        )
        return Words(cause, "experts", evidence)
    return Words(f"{tensors} began equal on {ranks} and are no longer equal; {gradients}", where, evidence)


def _describe_groups(facts: DriftFacts) -> str:
    if not facts.groups:
        return "these ranks"
    equal = " and on ".join(format_ranks(each) for each in facts.groups if len(each) > 1)
    return f"all of these ranks, and are equal on {equal}"


def _describe_cause(cause: DriftCause) -> tuple[str, str]:
    """Return a sentence about the cause of a difference between replicas, and its place."""
    if cause.kind in ("option", "schedule"):
        return _describe_options(cause)
    if cause.kind == "write":
        return (
            f"their gradients are equal, and on {format_ranks(cause.ranks)} something other than the optimizer "
            "changed the weights after its step: they were loaded, swapped or averaged on a part of the ranks"
        ), "weights"
    if cause.kind in ("rows", "forward", "sequence"):
        place = "data" if cause.kind == "rows" else "forward pass"
        return _describe_forward(cause), cause.module or place
    text = "their gradients differ, although these ranks have the same rows and the same loss"
    if cause.kind == "local":
        return f"{text}; the output of {cause.module} is the first that differs", cause.module
    if cause.kind == "parts":
        return (
            f"{text}: different parts of the model that began as copies, or replicas whose gradients are not reduced "
            "over the ranks"
        ), "initial values"
    return f"{text}: the backward pass lacks a sum or a gather over the ranks", "backward pass"


def _describe_forward(cause: DriftCause) -> str:
    if cause.kind == "rows":
        ranks = format_ranks(cause.ranks)
        return f"{ranks} add up activations in the forward pass, but have different rows of the batch"
    if cause.kind == "sequence":
        part, whole = cause.counts
        gather = ", or a gather in front of it is missing" if cause.is_ambiguous else ""
        return (
            f"each rank calls {cause.module} with its part of the sequence, {part} of {whole} positions, and "
            f"gradients are not reduced over the ranks{gather}"
        )
    if not cause.module:
        return "these ranks have the same rows and compute other losses"
    return (
        f"these ranks have the same rows and compute other values, first seen in the output of {cause.module}; a sum "
        "over the ranks is missing there, or random numbers differ"
    )


def _describe_options(cause: DriftCause) -> tuple[str, str]:
    one, two = (f"{value:g} on rank {rank}" for value, rank in zip(cause.values, cause.ranks, strict=True))
    text = f"their gradients are equal, and the optimizer's {cause.option} is {one} and {two}"
    if cause.kind == "schedule":
        one, two = (
            f"{format_count(number, 'time')} on rank {rank}"
            for number, rank in zip(cause.counts, cause.ranks, strict=True)
        )
        return f"{text}: a scheduler steps {one} and {two} in this step", cause.site or "scheduler"
    return text, f"set at {cause.site}" if cause.site else "optimizer options"


@describe_facts.register
def _(facts: AlikeFacts, finding: Finding) -> Words:
    cause = f"{facts.num_alike} of {facts.num_experts} experts of a rank begin with the same values"
    return Words(cause, "initial values", (list_names(facts.names),))


@describe_facts.register
def _(facts: TokenFacts, finding: Finding) -> Words:
    if facts.shift:
        when = "later" if facts.shift > 0 else "earlier"
        cause = (
            f"{format_ranks(finding.ranks)} are data-parallel and draw the same rows: rank {finding.ranks[-1]} draws "
            f"each {abs(facts.shift)} forward passes {when}, from generators with the same seed"
        )
        evidence = (
            f"{facts.num_steps} forward passes with the same first row and the same state of the generators",
        )
        return Words(cause, "data", evidence)
    cause = f"{format_ranks(finding.ranks)} are data-parallel and see the same tokens, so these count twice"
    rows = format_count(facts.num_rows, "row")
    evidence = (f"{facts.num_shared} of {rows} of a rank; the same in the previous sampled step",)
    return Words(cause, "data", evidence)


@describe_facts.register
def _(facts: SameWorkFacts, finding: Finding) -> Words:
    axis = f"; the mesh axis `{facts.axis}` divides nothing" if facts.axis else ""
    cause = (
        f"{format_ranks(finding.ranks)} compute the same: they have the same rows and the same weights, and exchange "
        f"nothing{axis}"
    )
    evidence = (
        f"{format_count(facts.num_tensors, 'tensor')} of equal regions and values, no collective of more than 16 "
        f"elements between them in {facts.num_steps} sampled steps",
    )
    return Words(cause, "layout", evidence)


@describe_facts.register
def _(facts: OwnNormFacts, finding: Finding) -> Words:
    error, where = facts.error, "gradient norm"
    tensors = format_count(error.num_tensors, "tensor")
    if facts.source == "norm":
        evidence = (
            f"the clip found {finding.actual:.6g}, and the gradients of all ranks have {finding.expected:.6g}"
        )
    elif facts.source == "ranks":
        evidence = f"one rank multiplies gradients by {finding.expected:.6g}, another by {finding.actual:.6g}"
    else:
        residual = f"{error.residual:.1g}"
        evidence = (
            f"by this norm all sampled steps are clipped to one limit (to {residual}), by the right one not"
        )
    if error.part == "local":
        cause = f"each rank's norm counts only its own part of {tensors} that the ranks share among them"
    elif error.part == "unknown" and facts.source == "ranks":
        cause = "ranks clip by different coefficients: the norm does not cover the gradients of all ranks"
    elif error.part == "unknown" and facts.source == "coefficient":
        cause = "the norm counts tensors that every rank has whole and sharded ones by different factors"
    elif error.part == "unknown":
        cause = f"the norm is {format_factor(error.ratio)} times the norm of the gradients"
    else:
        kind = "that every rank has whole" if error.part == "replicated" else "that are sharded"
        times = "leaves out" if error.times == 0 else f"counts {format_factor(error.times)} times"
        cause = f"the norm {times} {tensors} {kind}"
    return Words(cause, where, (evidence,))


@describe_facts.register
def _(facts: NonfiniteFacts, finding: Finding) -> Words:
    if facts.what == "output":
        return Words(f"the output of {facts.module} is the first that is NaN or infinite", facts.module)
    if facts.what == "gradient":
        cause = f"the gradient of {facts.module} is NaN or infinite, and no output of a module was before"
        return Words(cause, "backward pass")
    return Words(
        "the loss is NaN or infinite, and no output of a module is: look at the loss function", "loss"
    )


def describe_missing_ranks(number: int) -> str:
    """Return a note that some ranks left no results, with a remedy."""
    ranks = format_count(number, "rank")
    return f"{ranks} left nothing to compare: on several nodes, give --out a folder that all of them share"


__all__ = ["describe_facts", "describe_missing_ranks"]
