"""The packages that megablocks' experts need, by the names under which they are imported."""

from __future__ import annotations

NEEDED = ("megablocks", "stk", "triton")
