"""Settings that `moeverify watch` passes to its processes. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moeverify.results.record import Record

VARIABLE = "MOEVERIFY_WATCH"
"""The environment variable with the settings, as JSON, for every process of the script."""

RANK_FILE = "rank{rank}.jsonl"
DATA_FILE = "rank{rank}.bin"


class Settings(Record):
    """Settings of a recording. Steps are optimizer steps, counted from 0.

    - `out`: folder of the run.
    - `first`, `last`: range of recorded steps, inclusive.
    - `limit`: a local tensor with more bytes is stored as a sketch.
    - `weights`: folder of a run whose initial weights are loaded into the model.
    - `replay`: folder of a run. One device gets the batches and generator states of this run instead of its own.
    - `seed`: seed of the generators of torch, NumPy and Python.
    - `nudge`: seed of random signs. Every initial weight moves by one unit of rounding in the direction of
      its sign. A second run of one device then shows the effect of rounding alone. The unit belongs to
      `nudge_dtype`, the dtype that the script computes in, or else to the dtype of the weights.
    - `outputs`: record the inputs and outputs of modules.
    - `operators`: step whose operators are all recorded.
    - `code`: record the executed lines of the user's code and the Python values that they assign.
    """

    out: Path
    first: int = 0
    last: int = 3
    limit: int = 64 * 2**20
    weights: Path | None = None
    replay: Path | None = None
    seed: int | None = None
    nudge: int | None = None
    nudge_dtype: Literal["bfloat16", "float16"] | None = None
    outputs: bool = False
    operators: int | None = None
    code: bool = True

    def includes(self, step: int) -> bool:
        """Return whether the tensors of a step are recorded."""
        return self.first <= step <= self.last
