"""Rules for the order of calls that a single run can break, without another run. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeverify.results.script import CallFacts, CallRule
from moeverify.train.calls.call import LoopCall


def find_discarded(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the `zero_grad` calls that discard gradients between backward passes of an optimizer step.

    `calls` are the calls of one optimizer step, here and below. Returns None if the rule holds.
    """
    first, last = backward_range(calls)
    inner = [call for call in calls[first:last] if call.name == "zero_grad" and call.discarded > 0]
    if not inner:
        return None
    norm = inner[0].discarded
    return CallFacts(rule=CallRule.DISCARDED, site=inner[0].site, actual=len(inner), norm=norm)


def find_emptied(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the `zero_grad` call between the last backward pass and the optimizer step, or None.

    It may concern only a part of the model, in order to freeze it. The calls do not show whether the
    optimizer gets gradients.
    """
    last = backward_range(calls)[1]
    late = [call for call in calls[last:] if call.name == "zero_grad" and call.discarded > 0]
    if not late:
        return None
    return CallFacts(rule=CallRule.EMPTIED, site=late[0].site, actual=len(late), norm=late[0].discarded)


def find_kept(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the first backward pass if it adds to the gradients of the previous optimizer step, or None."""
    first = next((call for call in calls if call.name == "backward"), None)
    if first is None or first.kept == 0.0:
        return None
    return CallFacts(rule=CallRule.KEPT, site=first.site, expected=1, norm=first.kept)


def find_misplaced_clip(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the clips that do not lie between the last backward pass and the optimizer step, or None.

    Early ones are right if a clip by another line, or of other parameters, lies there: two losses may each
    have their own clip.
    """
    last = backward_range(calls)[1]
    steps = [place for place, call in enumerate(calls) if call.name == "optimizer step" and place > last]
    end = steps[-1] if steps else len(calls)
    right = [(call.site, call.target) for call in calls[last:end] if clips(call)]
    early = [call for call in calls[:last] if clips(call)]
    if right:
        early = [call for call in early if (call.site, call.target) in right]
    late = [] if early or right else [call for call in calls[end:] if clips(call)]
    if not early and not late:
        return None
    first, rule = (early[0], CallRule.EARLY_CLIP) if early else (late[0], CallRule.LATE_CLIP)
    number = len(early or late) + right.count((first.site, first.target))
    return CallFacts(rule=rule, site=first.site, actual=number)


def find_eval(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the forward passes in evaluation mode if a step has backward passes and no others, or None."""
    found = [call for call in calls if call.name == "eval forward"]
    if not found or {"forward", "backward"} & {call.name for call in calls} != {"backward"}:
        return None
    return CallFacts(rule=CallRule.EVAL, site=found[0].site, actual=len(found))


def find_scaled_step(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the optimizer step on gradients of a scaled loss if no gradient scaler unscales any, or None."""
    names = {call.name for call in calls}
    step = next((call for call in calls if call.name == "optimizer step" and call.scale is not None), None)
    if step is None or "scaler scale" not in names or names & {"scaler step", "scaler unscale"}:
        return None
    return CallFacts(rule=CallRule.SCALED_STEP, site=step.site, actual=1, norm=step.scale or 1.0)


def find_scaled_clip(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the clip of gradients that a gradient scaler has not unscaled yet, or None.

    A limit of at least the root of the loss scale was multiplied by the scale on purpose.
    """
    after = calls[backward_range(calls)[1] :]
    end = next((place for place, call in enumerate(after) if call.name == "scaler step"), 0)
    names = [call.name for call in after[:end]]
    if "scaler unscale" in names:
        end = names.index("scaler unscale")
    clip = next((call for call in after[:end] if clips(call)), None)
    scale = next((call.scale for call in after if call.name.startswith("scaler")), None)
    if clip is None or clip.max_norm is None or scale is None or clip.max_norm**2 >= scale:
        return None
    return CallFacts(rule=CallRule.SCALED_CLIP, site=clip.site, actual=1, norm=scale)


def drop_skipped(calls: Sequence[LoopCall]) -> Sequence[LoopCall]:
    """Return the calls after the last step that a gradient scaler skipped because of infinite gradients."""
    names = [call.name for call in calls]
    skipped = [
        place
        for place, name in enumerate(names)
        if name == "scaler step" and names[place + 1 : place + 2] != ["optimizer step"]
    ]
    return calls[skipped[-1] + 1 :] if skipped else calls


def find_inner_schedule(calls: Sequence[LoopCall]) -> CallFacts | None:
    """Return the scheduler steps between the backward passes of one optimizer step, or None."""
    first, last = backward_range(calls)
    inner = [call for call in calls[first:last] if call.name == "scheduler step"]
    if not inner:
        return None
    return CallFacts(rule=CallRule.INNER_SCHEDULER, site=inner[0].site, actual=len(inner))


def clips(call: LoopCall) -> bool:
    """Return whether a call clips gradients; without a limit, it only measures their norm."""
    return call.name.startswith("clip_grad") and call.max_norm != math.inf


def backward_range(calls: Sequence[LoopCall]) -> tuple[int, int]:
    """Return the indices of the first and the last backward pass among the calls of a step.

    Without a backward pass, both are the number of calls.
    """
    places = [place for place, call in enumerate(calls) if call.name == "backward"]
    return (places[0], places[-1]) if places else (len(calls), len(calls))
