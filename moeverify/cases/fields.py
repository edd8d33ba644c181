"""Field types and the base class of the sections of a case."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

ADDS_RANKS = "adds ranks"
"""Marks the degrees whose product is the number of ranks."""

SPLITS_ROWS = "splits rows"
"""Marks the degrees whose product is the number of shares of the rows of the global batch."""

Degree = Annotated[int, Field(ge=1), ADDS_RANKS]
RowDegree = Annotated[int, Field(ge=1), ADDS_RANKS, SPLITS_ROWS]
BorrowedDegree = Annotated[int, Field(ge=1)]  # uses the ranks of other axes
Count = Annotated[int, Field(ge=1)]
WholeNumber = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Seconds = Annotated[float, Field(gt=0.0, le=1e7)]
NotNegative = Annotated[float, Field(ge=0.0)]
Factor = Annotated[float, Field(ge=1.0)]
Target = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


class Section(BaseModel):
    """A part of a case: immutable, without unknown fields, without implicit type conversion."""

    # Validators are built on first use, together with inner sections: most commands read only a few
    # sections.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


def default_section(section: type[Section], description: str) -> Any:
    """Return a field, like `Field`, whose default is a section with default values.

    The default is constructed without validation, which would build validators that a command may never
    need.
    """
    return Field(default=section.model_construct(), description=description)
