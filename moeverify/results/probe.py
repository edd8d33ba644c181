"""One thing that `moeverify doctor` looks at. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Answer:
    """What a probe found and what it means: `fail` makes verdicts wrong or impossible, `warn` limits them."""

    value: str
    meaning: str
    status: Status = "ok"


@dataclass(frozen=True)
class Probe:
    """A row of the report."""

    name: str
    value: str
    meaning: str
    status: Status = "ok"
