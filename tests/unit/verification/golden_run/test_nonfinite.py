"""A golden that is not finite is refused, with the line that makes the first NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moeverify.cases.schema import CustomModel, Recipe
from moeverify.errors import CaseError
from moeverify.verification.golden_run.golden import make_golden
from moeverify.verification.golden_run.nonfinite import find_nan


def test_the_line_that_makes_the_first_nan_is_named() -> None:
    x = torch.tensor([1.0, -1.0])

    def compute() -> None:
        scores = x.masked_fill(x < 0, float("-inf")).softmax(0)  # infinity alone may be right
        roots = x.sqrt()
        (roots + scores).log()

    assert find_nan(compute).endswith(": roots = x.sqrt()")
    assert not find_nan(lambda: x.exp() / torch.empty(2).fill_(0.0))  # infinity, not NaN


class Rooted(nn.Module):
    """Takes a root that is NaN for every negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).sqrt())


def test_a_golden_that_is_not_finite_is_refused_with_its_line(tmp_path: Path) -> None:
    recipe = Recipe(
        name="wild", model=CustomModel(factory=f"{__name__}:Rooted", vocab_size=16), steps=1, seed=7
    )
    message = r"Rooted` is not finite on one device: loss .* at step 0 \(NaN .*NaN is made at test_non.*sqrt"
    with pytest.raises(CaseError, match=message):
        make_golden(recipe, tmp_path / "golden", torch.device("cpu"))
