"""Base class of all data that a run produces."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_RANKS = 1 << 20
"""Far above every job. Loops over the ranks of a file that somebody made must end."""

Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
NumRanks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Seconds = Annotated[float, Field(ge=0.0, le=1e10, allow_inf_nan=False)]


class Record(BaseModel):
    """Immutable data with a fixed set of fields. Infinities and NaN are strings in JSON."""

    # Built on first use, so that a command that only lists faults does not build the schemas of run
    # results.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="strings",
        serialize_by_alias=True,
        defer_build=True,
    )
