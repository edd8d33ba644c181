"""What is off by less than what lies before it may be, so that nothing can be said of where it became wrong."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record


class OffUpstream(Record):
    """It is `factor` times the right one, and what it is made of may be off by a relative error of `limit` unseen.

    With `is_sure` it is what the ranks' own gradients make: then these are wrong, and by less than their bounds.
    """

    kind: Literal["off-upstream"] = "off-upstream"
    factor: Factor
    limit: float
    is_sure: bool = False
