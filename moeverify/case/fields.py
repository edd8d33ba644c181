"""Types of the fields of a case, and what all of its sections have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

ADDS_RANKS = "adds ranks"
"""Marks the degrees whose product is the number of ranks."""

SPLITS_ROWS = "splits rows"
"""Marks the degrees whose product is the number of shares that the rows of the global batch are divided into."""

Degree = Annotated[int, Field(ge=1), ADDS_RANKS]
RowDegree = Annotated[int, Field(ge=1), ADDS_RANKS, SPLITS_ROWS]
BorrowedDegree = Annotated[int, Field(ge=1)]  # its ranks are those of other axes
Count = Annotated[int, Field(ge=1)]
WholeNumber = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Factor = Annotated[float, Field(ge=1.0)]
Target = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Section(BaseModel):
    """A part of a case: immutable, every field known, no silent conversion of types."""

    # Built on first use: most commands read a few sections, and those inside them are built with them.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


def default_section(section: type[Section], description: str) -> Any:
    """Return a field whose default is a section of defaults, as `Field` does.

    It is constructed and not validated: that would build what a command may never read.
    """
    return Field(default=section.model_construct(), description=description)
