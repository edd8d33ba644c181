"""Values whose error may come from undetected errors of their inputs."""

from __future__ import annotations

from typing import Literal

from moeverify.results.factor import Factor
from moeverify.results.record import Record


class OffUpstream(Record):
    """A value that is `factor` times the correct one, although its inputs may explain the error.

    The inputs may have an undetected relative error of `limit`. `is_sure` means that the value follows from
    the ranks' own gradients. These are then wrong by less than their bounds.
    """

    kind: Literal["off-upstream"] = "off-upstream"
    factor: Factor
    limit: float
    is_sure: bool = False
