"""The choice of a torchtitan model for `moeverify init`, in a package that is laid out like torchtitan's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks.torchtitan import _reduce_experts, find_arguments
from moeverify.verification.worker.probes.factory import adapt, list_expert_degrees


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


def test_a_layer_gets_few_narrow_experts_and_a_token_a_quarter_of_them() -> None:
    parts = [SimpleNamespace(num_experts=64, top_k=8, hidden_dim=512) for _ in range(2)]
    router = SimpleNamespace(num_experts=64, top_k=8, gate=SimpleNamespace(out_features=64))
    moe = SimpleNamespace(
        num_experts=64,
        router=router,
        routed_experts=SimpleNamespace(inner_experts=parts[0], token_dispatcher=parts[1]),
    )
    _reduce_experts(moe, 8)
    assert [each.num_experts for each in (moe, router, *parts)] == [8, 8, 8, 8]
    assert (router.top_k, parts[1].top_k, router.gate.out_features, parts[0].hidden_dim) == (2, 2, 8, 64)


def test_an_adapter_has_degrees_of_experts_only_for_models_with_experts() -> None:
    adapter = "moeverify.stacks.torchtitan:parallelize"
    assert list(list_expert_degrees(adapter, nn.ModuleDict({"experts": nn.Linear(2, 2)}))) == [
        "expert_parallel_degree"
    ]
    assert list(list_expert_degrees(adapter, nn.Linear(2, 2))) == []


@pytest.mark.usefixtures("_package")
def test_a_package_without_a_registry_is_refused() -> None:
    with pytest.raises(CaseError, match=r"no package around .* has a `model_registry`"):
        find_arguments("torchtitan.models:x", {})


def test_other_factories_stay() -> None:
    assert adapt("my_gpt.model:make", {"n": 1}) == ("my_gpt.model:make", {"n": 1})
