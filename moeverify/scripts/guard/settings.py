"""Settings that `moeverify watch --guard` passes to its processes. No torch."""

from __future__ import annotations

from pathlib import Path

from moeverify.results.record import Record

VARIABLE = "MOEVERIFY_GUARD"
"""The environment variable with the settings, as JSON, for every process of the script."""

_ALWAYS = 4  # number of first steps that are all sampled: most errors exist from the start


class GuardSettings(Record):
    """Settings of a guard: the folder `out`, and the sampled steps (the first four, then each `every`-th).

    With `debug`, a rank stops in `multiprocessing_pdb` when it or another rank has a finding.
    """

    out: Path
    every: int = 16
    debug: bool = False

    def samples(self, step: int) -> bool:
        """Return whether a step is sampled; each `every`-th and the next, for rules over two steps."""
        return step < _ALWAYS or step % self.every < 2
