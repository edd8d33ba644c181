"""Which calls of a user's own model are replayed for an origin: from the module itself to what is around it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeverify.axes.groups import list_degrees
from moeverify.case.schema import Case
from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.own.calls import Call, Calls
from moeverify.diagnose.own.module import OwnModule
from moeverify.golden.store import StoredGolden
from moeverify.train.custom_subject import CustomSubject
from moeverify.train.module_taps import BACKWARD
from moeverify.train.subjects import subject_of


def find_own_module(
    case: Case, golden: StoredGolden, step: int, origin: Origin, search: Search | None, device: torch.device
) -> OwnModule | None:
    """Return what can be replayed for an origin; None of the reference model. No collective."""
    recipe = case.recipe
    if search is None or step < 0 or not isinstance(subject_of(recipe), CustomSubject):
        return None

    def record() -> Iterator[Call]:
        calls = Calls(recipe, golden, step, device)
        is_loss = (origin.direction, origin.end, origin.culprit) == (BACKWARD, "output", "")
        names = [] if is_loss and not search.num_right[BACKWARD] else _list_names(origin.culprit)
        for number, name in enumerate(names):
            call = calls.record(name)
            if call is not None:
                yield call
            if number == 0 and origin.direction == BACKWARD:
                yield calls.record_loss()
        if not names:
            yield calls.record_loss()

    sizes = tuple(sorted({size for size in list_degrees(case).values() if size > 1}))
    return OwnModule(record, search.matched, sizes)


def _list_names(culprit: str) -> list[str]:
    """Return the culprit and the module that calls it: what it takes may be numbers that nobody has compared."""
    around, _, own = culprit.rpartition(".")
    while own.isdecimal():
        around, _, own = around.rpartition(".")
    return [culprit] if not culprit else [culprit, around]
