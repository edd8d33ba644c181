"""The call sites of a training loop that belong to a finding. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moeverify.results.place import UserCall
from moeverify.train.calls.call import LoopCall

USED, BACKWARD, STEP, CLIP, DATA = "module called", "backward", "optimizer step", "clip", "batch drawn"


def list_sites(
    chosen: Sequence[str], calls: Iterable[LoopCall], *, data: str, used: str
) -> tuple[UserCall, ...]:
    """Return the chosen call sites that are known, in this order.

    `calls` are from one step. `data` is the line that drew the batch, and `used` the one that calls the module.
    """
    found = {call.name: call.site for call in calls if call.site}
    known = {
        BACKWARD: found.get("backward", ""),
        STEP: found.get("optimizer step", ""),
        CLIP: next((site for name, site in found.items() if name.startswith("clip_grad")), ""),
        DATA: data,
        USED: used,
    }
    return tuple(UserCall(name=name, site=known[name]) for name in chosen if known[name])
