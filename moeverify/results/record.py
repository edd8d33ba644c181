"""The base of everything that a run leaves behind as data."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable data with known fields; infinities and NaN are strings in JSON."""

    # Built on first use: a command that only lists faults does not pay for the results of a run.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="strings",
        serialize_by_alias=True,
        defer_build=True,
    )
