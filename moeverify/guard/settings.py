"""What `moeverify watch --guard` asks of the processes that it starts. No torch."""

from __future__ import annotations

from pathlib import Path

from moeverify.results.record import Record

VARIABLE = "MOEVERIFY_GUARD"
"""The environment variable that carries the settings, as JSON, to every process of the script."""

_ALWAYS = 4  # the first steps are all sampled: most bugs are there from the start


class GuardSettings(Record):
    """Where ranks leave what they sampled, and in which steps they sample: the first four, then each `every`-th.

    With `debug`, a rank that finds something, or learns that others have, stops in `multiprocessing_pdb`.
    """

    out: Path
    every: int = 16
    debug: bool = False

    def samples(self, step: int) -> bool:
        """Return whether a step is sampled; the step after each `every`-th too, for what must happen twice."""
        return step < _ALWAYS or step % self.every < 2
