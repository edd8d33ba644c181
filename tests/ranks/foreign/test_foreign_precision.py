"""Mixed precision in a user's own hands: what the policy really did, on which module, in which dtype."""

from __future__ import annotations

from typing import Any

import pytest

NORMS = "in_float32: ['layers.*.norm', 'layers.*.router']"


@pytest.mark.parametrize("name", ["right", "wide-norms", "built-in"])
def test_what_the_policy_says_is_seen(mixed: Any, name: str) -> None:
    case = mixed.results[name]
    assert (case.verdict, case.reason, case.findings) == ("pass", "", ())
