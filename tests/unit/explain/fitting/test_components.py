"""Parts of the golden's gradient, which the model alone may not show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeverify.explain.fitting import components
from moeverify.explain.fitting.components import find_components


def test_a_model_whose_loss_only_its_own_step_computes_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object) -> Any:
        raise ValueError("the model returned tuple")

    monkeypatch.setattr(components, "make_components", make)
    case: Any = SimpleNamespace(recipe=SimpleNamespace(step="mine:train_step"))
    golden: Any = None
    assert find_components(case, golden, 0, torch.device("cpu")) is None
    case.recipe.step = None
    with pytest.raises(ValueError, match="returned tuple"):
        find_components(case, golden, 0, torch.device("cpu"))
