"""Refusals of ready-made adapters: a framework that is missing or too old, and unknown names."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from moeverify.errors import CaseError
from moeverify.parallel.regions.region import Region
from moeverify.stacks import torch_native, transformers
from moeverify.stacks.framework import import_framework
from moeverify.train.parallelize_custom import ParallelizedCustomModel


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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which modules are imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_framework_that_is_there_and_fails_is_not_said_to_be_missing(folder: Path) -> None:
    # Like DeepSpeed without a CUDA compiler, or any framework without a library that it imports.
    (folder / "without_compiler.py").write_text("raise OSError('CUDA_HOME does not exist')")
    (folder / "without_library.py").write_text("import no_such_library")
    for name, reason in (
        ("without_compiler", "OSError: CUDA_HOME does not exist"),
        ("without_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    ):
        with pytest.raises(CaseError) as error:
            import_framework(name, least="1.2.0")
        text = refuse(error)["layout.parallelize"]
        assert f"`{name}` is there and cannot be imported: {reason}" in text
        assert "pip install" not in text
        assert f'-c "import {name}"` shows where it fails' in text
    with pytest.raises(CaseError) as error:
        import_framework("no_such.core", least="1.2.0", distribution="no-such-core")
    assert 'pip install "no-such-core>=1.2.0"' in refuse(error)["layout.parallelize"]


def test_a_checkout_that_pip_does_not_know_has_the_version_that_it_says(folder: Path) -> None:
    (folder / "checked_out.py").write_text("__version__ = '1.3.0rc1'")
    assert import_framework("checked_out", least="1.2.0").__version__ == "1.3.0rc1"
    with pytest.raises(CaseError) as error:
        import_framework("checked_out", least="1.10.0")
    assert "checked_out 1.3.0rc1 is installed" in refuse(error)["layout.parallelize"]


@pytest.mark.parametrize("says", ["", "__version__ = 'unknown'", "__version__ = None"])
def test_a_version_that_is_not_known(folder: Path, says: str) -> None:
    (folder / "unnumbered.py").write_text(says)
    sys.modules.pop("unnumbered", None)
    with pytest.raises(CaseError) as error:
        import_framework("unnumbered", least="1.2.0")
    text = refuse(error)["layout.parallelize"]
    assert "the version of `unnumbered` is not known" in text
    assert str(folder / "unnumbered.py") in text
    assert "`pip install -e`: 1.2.0 or newer" in text


def test_declared_places_that_there_are_not_are_reported_together() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 2, bias=False), "two": nn.Linear(4, 2, bias=False)})
    whole = {"mlp.one.weight": torch.zeros(4, 4), "mlp.two.weight": torch.zeros(4, 4)}
    names = {"one.weight": "mlp.won.weight", "two.weight": "mlp.two.weight"}
    regions = {
        "two.weight": Region.box((4, 4), [range(2), range(2)]),
        "three.weight": Region.whole((4, 4)),  # of another rank
    }
    with pytest.raises(CaseError) as error:
        ParallelizedCustomModel(model, names=names, regions=regions).list_shards(whole)
    misnamed, misshapen = (str(problem) for problem in error.value.problems)
    assert "`one.weight` is `mlp.won.weight`, and the whole model has no such parameter" in misnamed
    assert "most alike are mlp.two.weight, mlp.one.weight" in misnamed
    assert "`two.weight` is (2, 2) of (4, 4); it has the shape (2, 4)" in misshapen
    regions = {"one.weight": Region.box((4, 4), [range(2), range(4)])}
    with pytest.raises(CaseError) as error:
        ParallelizedCustomModel(model, regions=regions).list_shards(whole)
    (unnamed,) = (str(problem) for problem in error.value.problems)
    assert "names={'one.weight': ...}" in unnamed


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
