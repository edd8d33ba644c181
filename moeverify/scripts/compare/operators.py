"""The operators of two recorded runs as one table."""

from __future__ import annotations

from pathlib import Path

from moeverify.errors import FormatError
from moeverify.explain.operator_table import make_table
from moeverify.results.operator_table import OperatorTable
from moeverify.scripts.record.operators import read_operators

_MOST_SECONDS = 600.0


def compare_operators(expected: Path, actual: Path) -> OperatorTable:
    """Return a table of the operators of two runs from `moeverify watch --operators`, matched to each other.

    Raises: FormatError when a run has no operators, or when the runs have operators of different steps.
    """
    (step, one), (other, many) = read_operators(expected), read_operators(actual)
    if step != other:
        raise FormatError(
            f"{expected} has the operators of step {step}, {actual} those of step {other}",
            "record the same step of both",
        )
    return make_table(
        one,
        many,
        title=f"{actual.name} against {expected.name}",
        step=step,
        names=(expected.name, actual.name),
        seconds=_MOST_SECONDS,
    )
