"""The lines of a model that draw random numbers."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from moeverify.verification.golden_run.soundness import find_draws


def test_each_line_that_draws_is_named_once() -> None:
    x = torch.ones(2, 2, 4, 4)

    def compute() -> None:
        for _ in range(2):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.0)
            F.dropout(x, 0.0)
            torch.randn_like(x)

    found = find_draws(compute)
    assert len(found) == 1
    assert found[0].startswith("test_draws.py:")
    assert found[0].endswith(": torch.randn_like(x)")
