"""What `moeverify watch` asks of the processes that it starts. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moeverify.results.record import Record

VARIABLE = "MOEVERIFY_WATCH"
"""The environment variable that carries the settings, as JSON, to every process of the script."""

RANK_FILE = "rank{rank}.jsonl"
DATA_FILE = "rank{rank}.bin"


class Settings(Record):
    """What to record, and where.

    Optimizer steps `first` to `last` are recorded, counted from 0. A tensor of which a rank has more than `limit`
    bytes is kept as a sketch. `weights` is the folder of a run whose initial weights are put into the model. `nudge`
    moves every initial weight by one unit of rounding, with signs of that seed: a second run of one device then
    shows how far rounding alone moves everything. The unit is that of `nudge_dtype`, in which the script computes, or
    else of the weights. `outputs` records what goes into modules and comes out of them, `operators` every operator of
    that step.
    """

    out: Path
    first: int = 0
    last: int = 3
    limit: int = 64 * 2**20
    weights: Path | None = None
    seed: int | None = None
    nudge: int | None = None
    nudge_dtype: Literal["bfloat16", "float16"] | None = None
    outputs: bool = False
    operators: int | None = None

    def includes(self, step: int) -> bool:
        """Return whether the tensors of a step are recorded."""
        return self.first <= step <= self.last
