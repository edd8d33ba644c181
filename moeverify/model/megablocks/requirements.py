"""Import names of the packages that megablocks' experts need."""

from __future__ import annotations

NEEDED = ("megablocks", "stk", "triton")
