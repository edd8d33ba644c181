"""Labels of swept values in the names of cases."""

from __future__ import annotations

from collections.abc import Mapping


def label_values(values: Mapping[str, str]) -> str:
    """Return the suffix of a case's name for swept values: fields without their sections."""
    return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in values.items())
