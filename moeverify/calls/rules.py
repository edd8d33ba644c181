"""Rules of the order of calls that a run breaks by itself, whatever another run does. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.calls.call import Call
from moeverify.results.script import CallFacts, CallRule


def find_discarded(calls: Sequence[Call]) -> CallFacts | None:
    """Return the calls of zero_grad that throw gradients away between the backward passes of one optimizer step."""
    first, last = backward_range(calls)
    inner = [call for call in calls[first:last] if call.name == "zero_grad" and call.discarded > 0]
    if not inner:
        return None
    norm = inner[0].discarded
    return CallFacts(rule=CallRule.DISCARDED, site=inner[0].site, actual=len(inner), norm=norm)


def find_emptied(calls: Sequence[Call]) -> CallFacts | None:
    """Return the call of zero_grad between the last backward pass and the optimizer step.

    It may be that of a part of the model, to freeze it: whether the optimizer gets gradients is not in the calls.
    """
    last = backward_range(calls)[1]
    late = [call for call in calls[last:] if call.name == "zero_grad" and call.discarded > 0]
    if not late:
        return None
    return CallFacts(rule=CallRule.EMPTIED, site=late[0].site, actual=len(late), norm=late[0].discarded)


def find_kept(calls: Sequence[Call]) -> CallFacts | None:
    """Return the first backward pass, where it adds to the gradients of the optimizer step before."""
    first = next((call for call in calls if call.name == "backward"), None)
    if first is None or first.kept == 0.0:
        return None
    return CallFacts(rule=CallRule.KEPT, site=first.site, expected=1, norm=first.kept)


def find_early_clip(calls: Sequence[Call]) -> CallFacts | None:
    """Return the clips before the last backward pass of an optimizer step, where none comes after it."""
    last = backward_range(calls)[1]
    early = [call for call in calls[:last] if clips(call)]
    if not early or any(map(clips, calls[last:])):
        return None
    return CallFacts(rule=CallRule.EARLY_CLIP, site=early[0].site, actual=len(early))


def find_inner_schedule(calls: Sequence[Call]) -> CallFacts | None:
    """Return the scheduler steps between the backward passes of one optimizer step."""
    first, last = backward_range(calls)
    inner = [call for call in calls[first:last] if call.name == "scheduler step"]
    if not inner:
        return None
    return CallFacts(rule=CallRule.INNER_SCHEDULER, site=inner[0].site, actual=len(inner))


def clips(call: Call) -> bool:
    """Return whether a call is a clip of gradients."""
    return call.name.startswith("clip_grad")


def backward_range(calls: Sequence[Call]) -> tuple[int, int]:
    """Return the places of the first and the last backward pass among the calls of a step."""
    places = [place for place, call in enumerate(calls) if call.name == "backward"]
    return (places[0], places[-1]) if places else (len(calls), len(calls))
