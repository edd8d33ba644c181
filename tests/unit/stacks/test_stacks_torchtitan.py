"""The choice of a torchtitan model for `moeverify init`, in a package that is laid out like torchtitan's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks.torchtitan import find_arguments
from moeverify.verification.worker.probes.factory import adapt


@pytest.fixture
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchtitan" / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text("class Model: ...\n")
    (folder / "__init__.py").write_text(
        "from test_stacks_torchtitan import FLAVORS, model_registry\ntiny_configs = FLAVORS\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)


FLAVORS = {"wide": 8, "debugmodel": 2, "of_another_machine": None}


def model_registry(flavor: str) -> SimpleNamespace:
    """Return a spec like torchtitan's; one flavor cannot be made."""
    width = FLAVORS[flavor]
    assert width is not None
    layers = [SimpleNamespace(), SimpleNamespace(moe="experts" if flavor == "wide" else None)]
    return SimpleNamespace(model=SimpleNamespace(build=lambda: nn.Linear(width, width), layers=layers))


@pytest.mark.usefixtures("_package")
def test_the_smallest_flavor_of_the_package_is_chosen_and_its_experts_are_few() -> None:
    expected = {"spec": "torchtitan.models.tiny:model_registry", "flavor": "debugmodel", "layers": 2}
    assert find_arguments("torchtitan.models.tiny.model:Model", {}) == expected
    factory, fields = adapt("torchtitan.models.tiny:Model", {"flavor": "wide"})
    assert factory == "moeverify.stacks.torchtitan:make"
    assert fields == {**expected, "flavor": "wide", "experts": 8}


@pytest.mark.usefixtures("_package")
def test_a_package_without_a_registry_is_refused() -> None:
    with pytest.raises(CaseError, match=r"no package around .* has a `model_registry`"):
        find_arguments("torchtitan.models:x", {})


def test_other_factories_stay() -> None:
    assert adapt("my_gpt.model:make", {"n": 1}) == ("my_gpt.model:make", {"n": 1})
