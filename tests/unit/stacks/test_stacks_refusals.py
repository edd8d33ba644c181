"""What ready-made adapters refuse: a framework that is missing or too old, and names that it does not have."""

from __future__ import annotations

from importlib import metadata

import pytest
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks import torch_native, transformers
from moeverify.stacks.framework import import_framework


def refuse(error: pytest.ExceptionInfo[CaseError]) -> dict[str, str]:
    return {problem.path or "": str(problem) for problem in error.value.problems}


def test_a_framework_that_is_not_installed() -> None:
    with pytest.raises(CaseError) as error:
        import_framework("no_such_framework", least="1.2.0")
    text = refuse(error)["layout.parallelize"]
    assert "`no_such_framework` cannot be imported" in text
    assert 'pip install "no_such_framework>=1.2.0"' in text


def test_a_release_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.9.3")
    with pytest.raises(CaseError) as error:
        import_framework("json", least="1.10.0")
    assert "json 1.9.3 is installed" in refuse(error)["layout.parallelize"]
    monkeypatch.setattr(metadata, "version", lambda name: "1.10.0.dev3")
    assert import_framework("json", least="1.10.0").dumps(1) == "1"


def test_modules_and_styles_that_there_are_not_are_reported_together() -> None:
    model = nn.ModuleDict({"up": nn.Linear(2, 2)})
    with pytest.raises(CaseError) as error:
        torch_native.parallelize(model, None, blocks="layers.*", plan={"up": "diagonal", "down": "rowwise"})  # type: ignore[arg-type]
    found = refuse(error)
    assert set(found) == {"layout.arguments.blocks", "layout.arguments.plan.down", "layout.arguments.plan.up"}
    assert "it has up" in found["layout.arguments.plan.down"]
    assert "write colwise, rowwise, sequence" in found["layout.arguments.plan.up"]


def test_a_family_that_transformers_does_not_have() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    with pytest.raises(CaseError) as error:
        transformers.make("no_such_family")
    assert "has no family `no_such_family`" in refuse(error)["recipe.model.arguments.model_type"]


def test_a_model_of_another_make() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    with pytest.raises(CaseError) as error:
        transformers.parallelize(nn.Linear(2, 2), None)  # type: ignore[arg-type]
    assert "Linear is no model of transformers" in refuse(error)["layout.parallelize"]


def test_constants_of_a_model_get_values_that_can_be_told_apart() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = transformers.make("llama", **sizes, num_attention_heads=2, num_key_value_heads=2)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert norms
    assert all(p.unique().numel() == p.numel() for p in norms)
