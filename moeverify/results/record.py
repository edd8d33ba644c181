"""Base class of all data that a run produces."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
