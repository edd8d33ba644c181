"""Sentences about the comparison of two recorded scripts. Importing it extends `describe_facts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.words.check import Words, describe_facts
from moeverify.report.words.factor import format_factor
from moeverify.results.checks import CheckName
from moeverify.results.comparable import comparable
from moeverify.results.finding import Finding
from moeverify.results.script import (
    BatchFacts,
    CallFacts,
    CallRule,
    CopyFacts,
    MemberFacts,
    NormFacts,
    OptionFacts,
    ScriptCheck,
)

_MOST_NAMED = 3
# Broken rules that need no other run, as templates.
_OWN_RULES = {
    CallRule.KEPT: "no zero_grad since the previous optimizer step: new gradients are added to its gradients",
    CallRule.LATE_CLIP: "gradients are clipped after the optimizer step, which has used them already",
    CallRule.SCALED_CLIP: "gradients are clipped while they are multiplied by the loss scale {norm:g}: no "
    "scaler.unscale_ before the clip",
    CallRule.SCALED_STEP: "the optimizer gets gradients that are multiplied by the loss scale {norm:g}: it steps "
    "without scaler.step or scaler.unscale_",
    CallRule.NEW_OPTIMIZER: "each step has a new optimizer of the same parameters, which begins without the moments "
    "of the one before",
    CallRule.EVAL: "all forward passes that are trained on run in evaluation mode, with {dropouts} "
    "off: no model.train() before them",
    CallRule.SAME_EPOCH: "the sampler shuffles epoch {expected} twice, so both have the same order: no "
    "sampler.set_epoch before the second",
    CallRule.INNER_SCHEDULER: "the scheduler steps between the backward passes of one optimizer step: once for each "
    "micro-batch",
}


@describe_facts.register
def _(facts: BatchFacts, finding: Finding) -> Words:
    rows = format_count(facts.num_rows, "row")
    evidence = f"not seen of the {rows} of RUN_A's global batch: {facts.num_missing}"
    if facts.num_other:
        cause = f"{format_ranks(facts.ranks)} saw other rows than RUN_A"
        evidence += f"; seen, but not in it: {facts.num_other}"
    elif facts.repeated:
        cause = f"{format_ranks(facts.repeated)} saw the same rows, and nobody saw the others"
    elif facts.num_repeated:
        cause = f"rows were seen more often than in RUN_A, by {format_ranks(facts.ranks)}"
        evidence += f"; seen once too often: {facts.num_repeated}"
    else:
        cause = "rows of RUN_A's global batch were not seen by any rank"
    return Words(cause, "data", (evidence,))


@describe_facts.register
def _(facts: MemberFacts, finding: Finding) -> Words:
    names = (finding.tensor, *facts.others)
    evidence = (f"{format_count(len(names), 'parameter')}: {list_names(names)}",)
    if facts.which == "missing":
        return Words("no optimizer has these parameters, so they are never updated", "optimizer", evidence)
    if facts.which == "replaced":
        cause = (
            "no optimizer has these parameters, and those that it has instead never get a gradient: it was built "
            "before the model was wrapped, copied or moved"
        )
        return Words(cause, "optimizer", evidence)
    if facts.which == "idle":
        cause = "no parameter of the optimizer ever got a gradient in `grad`, so its steps change nothing"
        return Words(cause, "optimizer", evidence)
    if facts.which == "detached":
        cause = (
            "the optimizer has these parameters and their module is called, but they have never got a gradient: they "
            "are detached, or used without gradients"
        )
        return Words(cause, "optimizer", evidence)
    if facts.which == "unexpected":
        return Words("RUN_A has no parameter of this name", "optimizer", evidence)
    cause = (
        "the matching part of RUN_A's tensor is unknown: no part has these initial values; begin both runs with "
        "the same weights (`--weights`)"
    )
    return Words(cause, "", evidence)


@describe_facts.register
def _(facts: CopyFacts, finding: Finding) -> Words:
    tensors, ranks = format_count(len(facts.names), "tensor"), format_ranks(finding.ranks)
    evidence: tuple[str, ...] = (list_names(facts.names),)
    if facts.kind == "siblings":
        first, last = finding.ranks[0], finding.ranks[-1]
        cause = (
            f"{tensors} of rank {last} began as copies of other tensors of rank {first}: both ranks drew the same "
            "random numbers for different parts of the model"
        )
        evidence = (f"{facts.names[0]} of rank {last} equals {facts.others[0]} of rank {first}",)
    elif facts.kind == "shards":
        cause = f"the shards of {tensors} began with the same values on {ranks}: drawn from the same random numbers"
    else:
        cause = (
            f"{ranks} add up equal values, so the sum is {facts.num_ranks} times one rank's value: {tensors} "
            "began with the same values on these ranks, but parts of a tensor must differ"
        )
    return Words(cause, facts.site or "initial values", evidence)


@describe_facts.register
def _(facts: OptionFacts, finding: Finding) -> Words:
    count = format_count(facts.num_parameters, "parameter")
    cause = f"the optimizer has another {facts.option} for {count}"
    if finding.actual is not None and finding.expected is not None:
        cause += f": {finding.actual:g} in step {finding.step}, in RUN_A {finding.expected:g}"
    evidence = (f"in RUN_A, {facts.expected_site} set it",) if facts.expected_site else ()
    return Words(cause, f"set at {facts.site}" if facts.site else "optimizer options", evidence)


@describe_facts.register
def _(facts: CallFacts, finding: Finding) -> Words:
    where = facts.site
    if facts.rule is CallRule.DISCARDED:
        times = "once" if facts.actual == 1 else f"{facts.actual} times"
        cause = (
            f"zero_grad is called {times} between the backward passes of one optimizer step: the gradients of the "
            "micro-batches before it are thrown away"
        )
        return Words(cause, where, (f"the first call discarded gradients of norm {facts.norm:.6g}",))
    if facts.rule is CallRule.EMPTIED:
        cause = (
            "zero_grad is called between the last backward pass and the optimizer step: "
            "no gradients are left for that step"
        )
        return Words(cause, where, (f"it discarded gradients of norm {facts.norm:.6g}",))
    if facts.rule is CallRule.EARLY_CLIP:
        return Words(_describe_early_clip(facts), where, ())
    if facts.rule is CallRule.SKIPPED_STEP:
        return Words(_describe_skipped(facts, finding), where, ())
    if facts.rule in _OWN_RULES:
        dropouts = format_count(facts.expected, "dropout module")
        cause = _OWN_RULES[facts.rule].format(norm=facts.norm, expected=facts.expected, dropouts=dropouts)
    elif facts.rule is CallRule.SCHEDULER:
        counts = [f"{number} times" if number != 1 else "once" for number in (facts.actual, facts.expected)]
        cause = f"the scheduler steps {counts[0]} per optimizer step, in RUN_A {counts[1]}"
    elif facts.expected and facts.actual:
        cause = f"{format_count(facts.actual, 'clip')} per optimizer step, in RUN_A {facts.expected}"
    else:
        cause = "gradients are clipped in one of the runs only"
    return Words(cause, where)


def _describe_skipped(facts: CallFacts, finding: Finding) -> str:
    other = next(rank for rank in finding.ranks if rank != finding.rank)
    steps = format_count(finding.step + 1, "optimizer step")
    return (
        f"rank {finding.rank} ran {facts.actual} backward passes in {steps} "
        f"and rank {other} {facts.expected}: rank {finding.rank} skips steps that rank {other} takes, or has more "
        "micro-batches"
    )


def _describe_early_clip(facts: CallFacts) -> str:
    counts = f"; {facts.actual} clips per optimizer step, in RUN_A {facts.expected}" if facts.expected else ""
    if facts.actual == 1:
        return f"gradients are clipped before the last backward pass of the optimizer step, and not after it{counts}"
    return (
        f"gradients are clipped {facts.actual} times in one optimizer step: later backward passes add to gradients "
        f"that were already clipped{counts}"
    )


@describe_facts.register
def _(facts: NormFacts, finding: Finding) -> Words:
    ratio = f"the gradient norm behind it is {format_factor(facts.ratio)} times RUN_A's"
    tensors = format_count(facts.num_tensors, "tensor")
    where = "gradient norm"
    if facts.part == "unknown":
        cause = (
            f"the gradients match when the last backward pass ends, and are then multiplied by "
            f"{format_factor(1 / facts.ratio)} of RUN_A's factor: by a norm, a clip or a divisor after the pass"
        )
        return Words(cause, "between the last backward pass and the optimizer step")
    if facts.part == "local":
        cause = (
            f"the gradients match, and their norm counts only this rank's part of {tensors} that are sharded"
        )
    else:
        kind = "that every rank has whole" if facts.part == "replicated" else "that are sharded"
        times = "leaves out" if facts.times == 0 else f"counts {format_factor(facts.times)} times"
        cause = f"the gradients match, and their norm {times} {tensors} {kind}"
    return Words(cause, where, (f"{ratio}; this explains it to {facts.residual:.1g}",))


def describe_note(about: str, run: str, text: str, rank: int) -> str:
    """Return a note about one run itself: `dropout`, `bypass`, `replay`, `reduces`, a second `model`, or a stop."""
    if about == "replay":
        return f"{run} replayed the batches that {text}"
    if about == "model":
        return f"{run} trains several models: {text}, and this is the prefix of its tensors' names"
    if about == "dropout":
        return (
            f"{run} has dropout in {text}: two runs draw different masks; set p to 0 in both to compare them"
        )
    if about == "bypass":
        return (
            f"{run} calls `{text}.forward` directly, which runs no hook of torch: `{text}` is taken for the model, "
            "and the rows of its first pass are not known"
        )
    if about == "reduces":
        return (
            f"{run}: the optimizer reduces gradients over ranks within its step, at {text}: gradients that differ "
            "between replicas before it are not compared, but updates are"
        )
    return f"{run}: recording stopped on rank {rank} ({text}); complete steps are compared"


def describe_mixed_passes() -> str:
    """Return that a replay could not restore the random numbers of the ranks."""
    return (
        "the replay did not restore all random numbers: its forward passes have parts of passes of the ranks, or "
        "draw numbers that do not belong to rows; give it the same rows per pass to compare dropout and noise"
    )


def describe_remedies(findings: Sequence[Finding], num_expected_ranks: int) -> tuple[str, ...]:
    """Return how to begin both runs with the same weights, or to give them the same rows, if they differ."""
    checks = {finding.check for finding in findings}
    remedies = []
    if ScriptCheck.BATCH in checks and num_expected_ranks == 1:
        remedies.append(
            "rows differ: record RUN_A with `--replay RUN_B` to give it the rows of RUN_B's ranks"
        )
    if CheckName.INITIAL_STATE in checks:
        remedies.append("initial weights differ: record RUN_B with `--weights RUN_A` to compare the rest")
    return tuple(remedies)


def describe_unequal_start(ranks: Sequence[int]) -> str:
    """Return that only some replicas of a tensor began with the values of RUN_A."""
    return (
        f"{format_ranks(ranks)} began with other values than RUN_A and the other ranks, although each rank has the "
        "whole tensor: the replicas were seeded differently, or not broadcast"
    )


def describe_early_end(run: str, last: int, wanted: int) -> str:
    """Return that a run has fewer steps than requested."""
    return f"{run} ended after step {last} of the steps up to {wanted}; the steps that both runs have are compared"


def describe_layout(
    num_expected: int, num_actual: int, steps: Sequence[int], *, num_tensors: int, num_whole: int
) -> str:
    """Return the sizes of the compared runs and the number of unsharded tensors.

    If all tensors are unsharded, the layout shards nothing.
    """
    whole = f", {num_whole} of {num_tensors} tensors whole on every rank" if num_actual > 1 else ""
    ranks = format_count(num_actual, "rank")
    return f"{ranks} against {num_expected}{whole}, steps {steps[0]}-{steps[-1]}"


def describe_scope(has_outputs: Sequence[bool]) -> str:
    """Return which quantities were not compared; `has_outputs` is for RUN_A and RUN_B."""
    if all(has_outputs):
        return "not compared: routing and buffers"
    text = "not compared: outputs of modules, routing and buffers"
    missing = " and ".join(name for name, has in zip(("RUN_A", "RUN_B"), has_outputs, strict=True) if not has)
    return f"{text}; `watch --outputs` has not recorded them in {missing}" if any(has_outputs) else text


def describe_inner_differences(number: int) -> str:
    """Return that tensors inside some modules differ although the modules' outputs match."""
    tensors = format_count(number, "tensor")
    return f"{tensors} differ inside of modules whose outputs match: tokens in another order, or padding"


def describe_bounds(precision: str, *, is_given: bool, is_measured: bool) -> tuple[str, ...]:
    """Return a note if the bounds were not measured, with the way to measure them.

    `is_given` says whether a noise run was given, and `is_measured` whether it fits this precision.
    """
    if is_measured:
        return ()
    narrow = precision == "mixed"
    how = "--nudge 1 --nudge-dtype bfloat16 (or float16)" if narrow else "--nudge 1"
    if is_given:
        return (
            "bounds come from the dtype: the run given as --noise was nudged by units of its own wide weights, and "
            f"something computes in 16 bits; record it with {how}",
        )
    gain = "decides the undecided ones" if narrow else "sees smaller differences"
    return (
        f"bounds come from the dtype; a run of one device with {how}, given as --noise, measures them and {gain}",
    )


def describe_undecided(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the differences that a comparison in 16 bits could not decide, if any."""
    gradients = [finding for finding in findings if finding.check == CheckName.GRADIENT]
    if not gradients:
        return ()
    worst = max(gradients, key=lambda finding: comparable(finding.error))
    differ = "gradient differs" if len(gradients) == 1 else "gradients differ"
    return (
        f"not decided: {len(gradients)} {differ} by up to {worst.error:.2g} ({worst.tensor}, step {worst.step}), "
        "without a cause. Rounding in 16 bits may do this where it moves tokens to other experts, and so may a "
        "small bug: measure the noise",
    )


def describe_unseen() -> str:
    """Return why a watched command produced no recording."""
    return (
        "no process has called a model and stepped an optimizer of torch, or its recording was refused (see above); "
        "an interpreter started with -I, -E or -S ignores PYTHONPATH"
    )


def describe_recorded(folder: str, steps: Mapping[int, int | None], first: int, last: int) -> str:
    """Return the recordings of a watched command; `steps` maps ranks to step counts, None if cut off."""
    text = f"{format_count(len(steps), 'rank')} recorded in {folder}"
    known = {rank: number for rank, number in steps.items() if number is not None}
    if known:
        text += _describe_made(known, first, last)
    if len(known) < len(steps):
        ranks = format_ranks(steps.keys() - known.keys())
        text += f"; cut off: {ranks}; steps that were complete can be compared"
    return text


def _describe_made(steps: Mapping[int, int], first: int, last: int) -> str:
    """Return a note if some rank made fewer steps than requested, else an empty string."""
    rank = min(sorted(steps), key=lambda each: steps[each])
    if steps[rank] > last:
        return ""
    made = format_count(steps[rank], "optimizer step")
    where = f"rank {rank}" if any(steps.values()) else "any rank"
    if steps[rank] == 0:
        return (
            f", but no optimizer of torch has stepped on {where}, so there is nothing to compare: the script never "
            "steps, or an optimizer that is no torch.optim.Optimizer does"
        )
    if steps[rank] <= first:
        return (
            f", but rank {rank} made {made}, and --steps {first}-{last} begins after that: nothing to compare"
        )
    return f"; rank {rank} made {made} of --steps {first}-{last}"


def describe_steps(folder: str, steps: Sequence[int], num_made: int | None) -> str:
    """Return the complete steps of a run; `num_made` is the number of optimizer steps, if known."""
    if steps:
        return f"{folder} has steps {steps[0]}-{steps[-1]}"
    if num_made == 0:
        return f"in {folder} no optimizer of torch has stepped"
    made = "" if num_made is None else f" of the {format_count(num_made, 'optimizer step')} that it made"
    return f"{folder} has no complete step{made}"


def describe_uncompared(number: int) -> str:
    """Return how many tensors could not be compared."""
    return (
        f"{format_count(number, 'tensor')} could not be compared: a run has no values of them, or only some before a "
        "reduction"
    )


def list_names(names: tuple[str, ...]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


__all__ = [
    "describe_bounds",
    "describe_early_end",
    "describe_facts",
    "describe_inner_differences",
    "describe_layout",
    "describe_note",
    "describe_recorded",
    "describe_remedies",
    "describe_scope",
    "describe_steps",
    "describe_uncompared",
    "describe_unequal_start",
    "describe_unseen",
    "list_names",
]
