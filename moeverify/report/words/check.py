"""Sentences about the result of a check: the place, the cause if the check knows it, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import NamedTuple

from moeverify.report.numbers import format_count, format_number, format_ranks
from moeverify.report.words.axis_use import describe_shares, describe_uses
from moeverify.report.words.optimizer import describe_recomputed
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.facts import (
    AxisUses,
    BitFacts,
    BySketch,
    ClipFacts,
    CollectiveFacts,
    ComparedFacts,
    CoverageFacts,
    CrossEntropyFacts,
    DtypeFacts,
    Dtypes,
    DtypeUse,
    ExpertFacts,
    Float8Facts,
    GatheredFacts,
    GradientSumFacts,
    Issue,
    NarrowParts,
    NumCollectives,
    ObjectiveFacts,
    OwnStep,
    PatternFacts,
    ReboundFacts,
    ReplayedModules,
    ReplicaFacts,
    RouterFacts,
    RouterGradientFacts,
    ShardingFacts,
)
from moeverify.results.finding import CheckResult, Finding
from moeverify.results.step_facts import RecomputedFacts

_MOST_NAMED = 3  # parameters per finding
_MOST_EXPERTS = 4

_PARTS = {"all": "", "experts": " of experts", "others": " outside of experts"}
_DTYPE_CAUSES: Mapping[DtypeUse, str] = {
    DtypeUse.COMPUTES: "{module} computes with parameters in {dtype} instead of {wanted}",
    DtypeUse.REDUCES: "the gradients of {module} are reduced in {dtype} instead of {wanted}",
    DtypeUse.WEIGHT: "the parameters of {module} are kept in {dtype} instead of {wanted}",
    DtypeUse.GRADIENT: "the gradients of {module} are kept in {dtype} instead of {wanted}",
    DtypeUse.OPTIMIZER_STATE: "the optimizer state of {module} is kept in {dtype} instead of {wanted}",
    DtypeUse.OUTPUT: "the output of {module} has dtype {dtype}, and on one device {wanted}",
    DtypeUse.OPERATOR: "{how} in {module} computes in {dtype}, and on one device in {wanted}",
    DtypeUse.RESIDUAL: "{module} casts its residual stream from {wanted} to {dtype}, and one device does not",
}
_DTYPE_HOLDERS = dict.fromkeys(DtypeUse, "parameters") | {
    DtypeUse.OUTPUT: "module outputs",
    DtypeUse.OPERATOR: "modules and functions",
    DtypeUse.RESIDUAL: "residual streams",
}
# Checks whose findings have no facts beyond name and kind.
_EVIDENCE: Mapping[str, str] = {
    CheckName.REPEAT: "{kind}: other bits when the same layout ran a second time",
    CheckName.RESUMED: "{kind}: other bits than the same layout without a checkpoint, bit for bit",
}
_NOTES: Mapping[str, str] = {
    CheckName.RESUMED: "against the same layout without a checkpoint, bit for bit",
}


def word_check(result: CheckResult) -> CheckResult:
    """Return the result of a check with its note, and with a text on the items it did not verify."""
    note, unseen = _NOTES.get(result.name, ""), ""
    if isinstance(result.facts, NumCollectives):
        note = f"up to {result.facts.most} collectives of a rank"
    elif isinstance(result.facts, BySketch):
        note = f"{result.facts.num_tensors} by sketch, {result.facts.num_projections} projections"
        unseen = _describe_open(result.name, result.facts)
    elif isinstance(result.facts, AxisUses):
        note, unseen = describe_uses(result.facts), describe_shares(result.facts)
    elif isinstance(result.facts, Dtypes):
        note = f"computes in {result.facts.computes}, reduces and keeps in {result.facts.kept}"
        unseen = _describe_unseen(result.facts)
    elif isinstance(result.facts, ReplayedModules):
        note, unseen = _describe_held(result.facts), _describe_left_out(result.facts)
    elif isinstance(result.facts, NarrowParts):
        unseen = _describe_narrow_parts(result.facts)
    elif isinstance(result.facts, OwnStep):
        unseen = _describe_own_step(result.name, result.facts)
    return result.model_copy(update={"note": note, "unseen": unseen})


def _describe_open(check: str, facts: BySketch) -> str:
    if not facts.num_open:
        return ""
    tensors = format_count(facts.num_open, "tensor")
    return f"{check}: the estimated errors of {tensors} are too near to their bounds for sketches to decide"


def _describe_own_step(check: str, facts: OwnStep) -> str:
    first = "the gradient norm" if check == CheckName.CLIP else facts.first
    more = f" and of {format_count(facts.num_tensors - 1, 'more tensor')}" if facts.num_tensors > 1 else ""
    return (
        f"{check}: on one device, too, `{facts.step}` computes {first}{more} differently from the recipe's "
        "optimizer and clip; such results are only compared with the golden"
    )


class Words(NamedTuple):
    """Words derived from the facts of a finding; empty fields if the check knows nothing more."""

    cause: str = ""
    where: str = ""
    evidence: tuple[str, ...] = ()


@singledispatch
def describe_facts(facts: object, finding: Finding) -> Words:
    """Return the words for the facts that a check attached to a finding."""
    text = _EVIDENCE.get(finding.check)
    return Words(evidence=(text.format(kind=finding.kind),) if text else ())


@describe_facts.register
def _(facts: ComparedFacts, finding: Finding) -> Words:
    evidence = []
    if facts.absent_ranks:
        evidence.append(f"the run has no such tensor on ranks {_join(facts.absent_ranks)}")
    if facts.is_unexpected:
        evidence.append("the golden has no tensor of this name and size")
    if facts.num_nonfinite:
        evidence.append(f"{facts.num_nonfinite} elements are not finite")
    if facts.block:
        block = ", ".join(f"{start}:{stop}" for start, stop in facts.block)
        evidence.append(f"error estimated from sketches; the largest is in the block [{block}]")
    return Words(evidence=tuple(evidence))


@describe_facts.register
def _(facts: BitFacts, finding: Finding) -> Words:
    return Words(evidence=("the values are equal as numbers, but their bits or their dtype differ",))


@describe_facts.register
def _(facts: ReboundFacts, finding: Finding) -> Words:
    if not facts.kept_by:
        how = f"rounded to {facts.rounded_to}" if facts.rounded_to else "changed"
        evidence = "the error compares the values before and after; one device keeps them bit for bit"
        return Words(f"{finding.tensor} was {how} outside of the optimizer step", "", (evidence,))
    keepers = " and ".join(f"the {keeper}" for keeper in facts.kept_by)
    verb = "keeps" if len(facts.kept_by) == 1 else "keep"
    cause = (
        f"{finding.tensor} was bound to another tensor in step {finding.step}; {keepers} {verb} the old one"
    )
    return Words(cause, "", ("the error compares the old values with the values that the module has",))


@describe_facts.register
def _(facts: ReplicaFacts, finding: Finding) -> Words:
    groups = " | ".join(_join(group) for group in facts.groups)
    where = f"replicas over {', '.join(facts.axes)}" if facts.axes else ""
    return Words("", where, (f"{finding.kind}: ranks with equal bits: {groups}",))


@describe_facts.register
def _(facts: CoverageFacts, finding: Finding) -> Words:
    if facts.num_elements is None:
        return Words(evidence=(f"{finding.kind}: no rank holds any of it",))
    text = f"{finding.kind}: the ranks hold {facts.num_held} of {facts.num_elements} elements"
    if finding.code == Cause.DATA:
        cause = "the ranks together do not have each token of the batch exactly once: some are missing or repeated"
        return Words(cause, "", (text,))
    return Words(evidence=(text,))


@describe_facts.register
def _(facts: ShardingFacts, finding: Finding) -> Words:
    if facts.is_misplaced:
        return Words(
            f"ranks of {facts.axis} store experts that the placement of this step does not assign to them",
            "",
            ("an exchange did not take place on all ranks, or a rank has the experts of another row",),
        )
    if facts.is_unused:
        return Words(
            f"no parameter is divided over {facts.axis}, and no collective of the model ran over it",
            "",
            (
                "every rank of the axis computes the same: look at the sizes that `parallelize` passes on",
                f"if that is meant, declare it by checks.allow_replicated: [{facts.axis}]",
            ),
        )
    what = f"{finding.kind}{_PARTS[facts.part]}"
    if facts.modules:
        named, left_out = ", ".join(facts.modules[:_MOST_NAMED]), len(facts.modules) - _MOST_NAMED
        named = f"{named}{f' and {left_out} more' if left_out > 0 else ''}"
        if facts.is_repeated:
            return Words(f"{named}: on several ranks of one {facts.axis} group instead of one")
        if facts.is_elsewhere:
            return Words(f"{named}: on other ranks of {facts.axis} than their pipeline stage")
        what = f"{finding.kind} of {named}"
    return Words(f"all ranks of each {facts.axis} group hold the same {what}")


@describe_facts.register
def _(facts: DtypeFacts, finding: Finding) -> Words:
    cause = _DTYPE_CAUSES[facts.use].format(
        module=facts.module or "the model",
        dtype=facts.dtype,
        wanted=facts.wanted,
        how=", ".join(facts.how[:1]),
    )
    named = ", ".join(facts.parameters[:_MOST_NAMED])
    left_out = len(facts.parameters) - _MOST_NAMED
    more = f" and {left_out} more" if left_out > 0 else ""
    evidence = [f"{len(facts.parameters)} of {facts.num_known} {_DTYPE_HOLDERS[facts.use]}: {named}{more}"]
    if facts.use is DtypeUse.RESIDUAL:
        evidence = [f"{facts.dtype} rounds the whole residual stream, not only the output of {facts.module}"]
    if facts.site:
        evidence.insert(0, f"at {facts.site}")
    if facts.how and facts.use is not DtypeUse.OPERATOR:
        evidence.append(f"{'by' if facts.use is DtypeUse.REDUCES else 'its'} {', '.join(facts.how)}")
    if facts.could_declare:
        evidence.append(f"if that is meant, declare it by layout.in_float32: [{facts.module}]")
    return Words(cause, "", tuple(evidence))


@describe_facts.register
def _(facts: GatheredFacts, finding: Finding) -> Words:
    module = facts.module or "the model"
    if facts.is_stale:
        cause = f"{module} computes with the weights of the step before: they were not refreshed"
    elif facts.sources:
        moves = (f"rank {other}'s part as rank {rank}'s" for rank, other in facts.sources[:_MOST_NAMED])
        more = ", ..." if len(facts.sources) > _MOST_NAMED else ""
        cause = f"{module} computes with misplaced parts of weights: {', '.join(moves)}{more}"
    else:
        cause = f"{module} computes with gathered weights that differ from the weights that the ranks store"
    parameters = f"{facts.num_parameters} of {facts.num_known} gathered parameters"
    elements = f"{facts.num_wrong} of {facts.num_compared} compared elements"
    return Words(cause, "", (parameters, f"{elements} of {facts.parameter} in {facts.dtype}"))


_OPERANDS = {
    "input": "inputs",
    "weight": "weights",
    "grad_output": "gradients of outputs",
    "output": "outputs",
    "grad_input": "gradients of inputs",
    "grad_weight": "gradients of weights",
}


@describe_facts.register
def _(facts: Float8Facts, finding: Finding) -> Words:
    module = facts.module or "the model"
    layers = f"{facts.num_layers} of {facts.num_known} layers in float8"
    if facts.source == "none":
        return Words(f"{module} computes without float8", "", (layers,))
    *more, last = (_OPERANDS.get(name, name) for name in facts.operands)
    operands = f"{', '.join(more)} and {last}" if more else last
    cause = {
        "": f"{module} rounds {operands} to float8 with scales that do not match their largest elements",
        "own-rank": f"{module} scales {operands} by the largest element of one rank, not reduced over {facts.axis}",
        "step-before": f"{module} scales {operands} by the largest elements of the step before",
        "another": f"{module} scales {operands} by the largest elements of another operand",
        "numbers": f"{module} rounds {operands} to float8 numbers that do not follow from their scales",
        "product": f"{module} has {operands} that differ from the product of its float8 operands",
    }[facts.source]
    what = f"{_OPERANDS.get(facts.operand, facts.operand)} of {facts.layer}"
    scales = f"{facts.used:.6g} instead of {facts.wanted:.6g} for {what}"
    scales += f", which is the scale of {facts.other}" if facts.other else ""
    counted = f"{facts.num_wrong} of {facts.num_compared} compared "
    counted += "elements there" if facts.source in ("numbers", "product") else "scales there"
    return Words(cause, "", (layers, scales, counted))


@describe_facts.register
def _(facts: PatternFacts, finding: Finding) -> Words:
    return Words(f"`{facts.pattern}` of layout.in_float32 matches no module that computed anything")


@describe_facts.register
def _(facts: ExpertFacts, finding: Finding) -> Words:
    if not facts.wrong:
        return Words(evidence=("two experts have the same values, and were saved with different ones",))
    said = [
        f"{number} equals no saved expert" if twin is None else f"{number} is {twin}"
        for number, twin in facts.wrong[:_MOST_EXPERTS]
    ]
    if len(facts.wrong) > _MOST_EXPERTS:
        said.append(f"and {len(facts.wrong) - _MOST_EXPERTS} more")
    return Words("", f"expert {facts.wrong[0][0]}", (f"by global number: {', '.join(said)}",))


@describe_facts.register
def _(facts: RecomputedFacts, finding: Finding) -> Words:
    cause, evidence = describe_recomputed(facts, finding)
    return Words(cause, "", evidence)


@describe_facts.register
def _(facts: ClipFacts, finding: Finding) -> Words:
    if facts.is_coefficient:
        return Words("the clip coefficient does not follow from this rank's gradient norm")
    return Words("the gradient norm is not the norm of the ranks' gradients")


@describe_facts.register
def _(facts: CrossEntropyFacts, finding: Finding) -> Words:
    seen = f"{facts.num_wrong} of {facts.num_tokens} token losses are not the cross entropy of the rank's own logits"
    if not facts.dtype:
        return Words("the token losses are not the cross entropy of the rank's own logits", "", (seen,))
    cause = (
        f"the cross entropy is computed in {facts.dtype}: token losses hold only values that it can represent"
    )
    return Words(cause, "", (seen,))


@describe_facts.register
def _(facts: ObjectiveFacts, finding: Finding) -> Words:
    made_of = {
        "lm": "the ranks' own token losses, divided by the valid tokens of the batch",
        "total": "its terms, each of which is right",
    }.get(finding.tensor, "the inputs and choices of the ranks' own routers")
    numbers: tuple[str, ...] = ()
    if finding.expected is not None and finding.actual is not None:
        numbers = (f"computed again {finding.expected:.10g}, reported {finding.actual:.10g}",)
    return Words(f"the reported {finding.tensor} loss does not follow from {made_of}", "", numbers)


def _count_by_rank(factors: Mapping[int, float | None]) -> str:
    """Return how often a term counts on each rank, if the ranks differ."""
    if None in factors.values() or len(factors) > _MOST_FACTORS:
        return "another number of times on each rank"
    return " and ".join(f"{value:.4g} times on rank {rank}" for rank, value in factors.items())


_MOST_FACTORS = 4


@describe_facts.register
def _(facts: RouterGradientFacts, finding: Finding) -> Words:
    if facts.term == "combine" and facts.in_router and None in facts.factors.values():
        text = "the gradient of the router's weight does not follow from its input and its output gradient"
        return Words(text, "", (f"the same in {facts.num_routers} routers",))
    term, _, padding = facts.term.partition(" ")
    source = "the combine weights" if term == "combine" else f"the {term} loss"
    if padding:
        return Words(f"tokens of padding take part in the gradient of {source}", source)
    values = {None if each is None else f"{each:.4g}" for each in facts.factors.values()}
    (value,) = values if len(values) == 1 else ("",)
    times = f"{value} times" if value else _count_by_rank(facts.factors)
    evidence = [
        f"rank {rank}: {each:.6g} times the right gradient"
        for rank, each in facts.factors.items()
        if each is not None
    ]
    if facts.num_routers > 1:
        evidence.append(f"the same in {facts.num_routers} routers")
    if value is None:
        text = f"the gradient of {source} in the router does not follow from its input and the routing"
        return Words(text, source, tuple(evidence))
    if value == "0":
        text = f"{source} has no gradient in the router"
    elif facts.in_router:
        text = f"the router passes the gradient of {source} on to its weight {times}"
    else:
        text = f"the gradient of {source} counts {times} in the router"
    return Words(text, source, tuple(evidence))


@describe_facts.register
def _(facts: GradientSumFacts, finding: Finding) -> Words:
    layer = finding.tensor.rpartition(".")[0]
    if facts.is_own:
        text = f"the ranks' parts of the gradient of {layer} are not summed: each rank has its own"
    elif facts.factor is not None:
        text = f"the gradient of {layer} is {facts.factor:.4g} times the sum of the ranks' contributions"
    elif facts.left_out:
        text = f"the gradient of {layer} lacks the contribution of {format_ranks(facts.left_out)}"
    elif facts.factors:
        counted = _count_by_rank(facts.factors)
        text = f"the gradient of {layer} counts the contributions {counted}"
    else:
        text = f"the gradient of {layer} does not follow from its inputs and output gradients on all ranks"
    return Words(text)


@describe_facts.register
def _(facts: RouterFacts, finding: Finding) -> Words:
    noun = "experts" if facts.quantity == "counts" else "tokens"
    seen = f"{facts.num_wrong} of {facts.num_tokens} {noun}"
    if facts.quantity == "choice":
        text = f"{finding.tensor} chooses experts that do not follow from its own input and weights"
        margin = f", the clearest by {format_number(facts.margin or 0.0)} times the rounding of its scores"
        return Words(text, "", (seen + margin,))
    if facts.quantity == "weights":
        return Words(f"{finding.tensor} has weights that do not follow from its own scores", "", (seen,))
    return Words(f"{finding.tensor} counts a different number of tokens than it sent", "", (seen,))


@describe_facts.register
def _(facts: CollectiveFacts, finding: Finding) -> Words:
    counts = ", ".join(f"rank {rank} {count}" for rank, count in facts.counts.items())
    return Words(
        f"the ranks issue different collectives, first as {name_differing(facts)}",
        f"axis {facts.axis}",
        (*list_issues(facts), f"issued in all: {counts}"),
    )


def name_differing(facts: CollectiveFacts) -> str:
    """Return the name of the first collective in which the ranks differ."""
    axis = f"{facts.axis} " if facts.axis else ""
    return f"collective #{facts.number} of {axis}group ({_join(facts.ranks, ',')})"


def list_issues(facts: CollectiveFacts) -> tuple[str, ...]:
    """Return one line per group of ranks that issued the same collective."""
    if not facts.issues:
        counts = ", ".join(f"rank {rank} issued {count}" for rank, count in facts.counts.items())
        return (f"they agree in the first {facts.number - 1}, and no more is kept; {counts}",)
    return tuple(
        f"{'rank' if len(issue.ranks) == 1 else 'ranks'} {_join(issue.ranks)}: {_describe_issue(issue)}"
        for issue in facts.issues
    )


def _describe_issue(issue: Issue) -> str:
    if issue.signature is None:
        return "no further one"
    return f"{issue.signature}, called at {issue.site}"


def _describe_held(facts: ReplayedModules) -> str:
    """Return the number of choices that the ranks took from one device, if any was near a tie."""
    choices = format_count(facts.num_near_ties, "choice")
    held = f"{facts.num_held} of {choices} near a tie are one device's instead of the rank's"
    return held if facts.num_near_ties else ""


def _describe_left_out(facts: ReplayedModules) -> str:
    """Return the modules that were not computed again, each reason with an example."""
    if not facts.left_out:
        return ""
    reasons = [
        f"{names[0]} {reason or 'is not reproduced on one device either'}"
        + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
        for reason, names in facts.left_out.items()
    ]
    num_left_out = sum(map(len, facts.left_out.values()))
    known = format_count(num_left_out + facts.num_replayed, "module")
    return f"{num_left_out} of {known} were not computed again: {'; '.join(reasons)}"


def _describe_narrow_parts(facts: NarrowParts) -> str:
    """Return the modules in which one device of a float64 case rounds to a narrower dtype."""
    named = ", ".join(name or "the loss" for name in facts.modules[:_MOST_NAMED])
    more = f" and {len(facts.modules) - _MOST_NAMED} more" if len(facts.modules) > _MOST_NAMED else ""
    return (
        f"{facts.dtype} in {format_count(len(facts.modules), 'module')}: {named}{more}; "
        f"the bounds of {facts.num_tensors} of {facts.num_compared} tensors allow its rounding"
    )


def _describe_unseen(facts: Dtypes) -> str:
    """Return a note on parameters that could not be observed, e.g. because their modules are compiled."""
    if not facts.num_unseen:
        return ""
    return (
        f"{facts.num_unseen} of {facts.num_parameters} parameters, such as {facts.first_unseen}, were not seen in "
        "a computation: the dtypes in which they compute and are reduced were not verified"
    )


def _join(ranks: Sequence[int], mark: str = ", ") -> str:
    return mark.join(map(str, ranks))
