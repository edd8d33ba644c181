"""The values of a sweep, as the name of a case has them."""

from __future__ import annotations

from collections.abc import Mapping


def label_values(values: Mapping[str, str]) -> str:
    """Return what the values add to the name of a case: fields without their sections."""
    return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in values.items())
