"""Check that the steps after a load equal the steps of the uninterrupted run, bit for bit.

Applies only if the same layout saved and loaded: another layout reduces in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.results.checks import CheckName, Kind
from moeverify.verification.checks.base import Check, CheckOutcome, RankLoad, ShownTensors, make_outcome
from moeverify.verification.checks.repeat import find_changed_bits, make_findings
from moeverify.verification.compare.assembled import Key


class Resumed(Check[list[Key]]):
    """Bits of the steps after the load, against the steps after the save."""

    name = CheckName.RESUMED

    def inspect(self, load: RankLoad) -> list[Key] | None:
        """Return the keys of tensors whose bits differ on this rank; see `Check`."""
        if load.uninterrupted is None:
            return None
        after = [entry for entry in load.entries if entry.kind != Kind.LOADED]
        if len(load.uninterrupted) != len(after):
            return [(-1, "step", "number of steps")]
        return find_changed_bits(after, load.uninterrupted)

    def judge(self, shown: ShownTensors, reports: Sequence[list[Key]]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each tensor whose bits differ; see `Check`."""
        if not reports:
            return None
        return make_outcome(self.name, make_findings(self.name, shown, reports), len(shown.tensors))


CHECKS = (Resumed(),)
