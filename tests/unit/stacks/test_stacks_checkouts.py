"""Adapters of OLMo-core and picotron without these frameworks: refusals, replacements and surroundings.

Their runs with ranks are `make stacks`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moeverify.errors import CaseError
from moeverify.stacks import olmo_core, olmo_core_on_cpu, picotron, picotron_globals
from moeverify.stacks.framework import import_framework


def make_mesh(**sizes: int) -> Any:
    axes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1} | sizes
    return {axis: SimpleNamespace(size=lambda size=size: size) for axis, size in axes.items()}


def list_problems(error: pytest.ExceptionInfo[CaseError]) -> dict[str, str]:
    return {problem.path or "": str(problem) for problem in error.value.problems}


def no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("a refused layout makes no optimizer")


def test_olmo_core_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "olmo_core", None)
    with pytest.raises(CaseError) as error:
        olmo_core.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer)
    assert 'pip install "ai2-olmo-core>=3.0.0"' in list_problems(error)["layout.parallelize"]
    with pytest.raises(CaseError) as error:
        olmo_core.make("llama_like")
    assert set(list_problems(error)) == {"recipe.model.factory"}


def test_a_preset_and_a_model_that_are_not_olmo_cores_are_refused() -> None:
    pytest.importorskip("olmo_core")
    with pytest.raises(CaseError) as error:
        olmo_core.make("no_such_preset")
    assert "has no preset `no_such_preset`" in list_problems(error)["recipe.model.arguments.preset"]
    with pytest.raises(CaseError) as error:
        olmo_core.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer, no_such_field=1)
    assert set(list_problems(error)) == {"layout.arguments.no_such_field", "layout.parallelize"}


def test_tokens_are_gathered_by_experts_and_summed_with_their_weights() -> None:
    tokens = torch.randn(5, 3, dtype=torch.float64)
    experts = torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2, dtype=torch.float64)
    indices = experts.flatten().argsort(stable=True)
    unused = torch.empty(0)
    gathered = olmo_core_on_cpu.gather(tokens, indices, unused, unused, 2)
    torch.testing.assert_close(gathered, tokens.repeat_interleave(2, dim=0)[indices])
    scaled = gathered * (1 + experts.flatten()[indices, None])
    summed = olmo_core_on_cpu.scatter(scaled, indices, unused, weights, unused, 2)
    torch.testing.assert_close(summed, tokens * ((1 + experts) * weights).sum(1, keepdim=True))
    unweighted = olmo_core_on_cpu.scatter(gathered, indices, unused, None, unused, 2)
    torch.testing.assert_close(unweighted, 2 * tokens)


def test_a_kernel_is_replaced_once_and_only_for_tensors_outside_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = SimpleNamespace(gather=lambda *_: "kernel", scatter=lambda *_: "kernel")
    monkeypatch.setitem(sys.modules, "olmo_core", ModuleType("olmo_core"))
    monkeypatch.setitem(sys.modules, "olmo_core.ops", SimpleNamespace(moe=kernels))
    olmo_core_on_cpu.replace_kernels()
    replaced = kernels.gather
    olmo_core_on_cpu.replace_kernels()
    assert kernels.gather is replaced
    assert replaced(SimpleNamespace(is_cuda=True), 0, 0, 0, 2) == "kernel"
    tokens = torch.eye(2)
    empty = torch.empty(0)
    torch.testing.assert_close(replaced(tokens, torch.tensor([2, 3, 0, 1]), empty, empty, 2)[0], tokens[1])


def test_a_project_without_a_package_is_asked_for_as_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "picotron", None)
    with pytest.raises(CaseError) as error:
        picotron.parallelize(nn.Linear(2, 2), make_mesh(), make_optimizer=no_optimizer)
    found = list_problems(error)["layout.parallelize"]
    assert "add the folder of a checkout of it to PYTHONPATH" in found
    assert "pip" not in found
    assert import_framework("json", least="").dumps(1) == "1"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of process groups of a project that is laid out like picotron."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "picotron"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("data_parallel", "tensor_parallel"):
        (tmp_path / "picotron" / name).mkdir(parents=True)
    (tmp_path / "picotron" / "data_parallel" / "data_parallel.py").write_text("DataParallelBucket = None\n")
    (tmp_path / "picotron" / "tensor_parallel" / "tensor_parallel.py").write_text(
        "apply_tensor_parallel = None\n"
    )
    (tmp_path / "picotron" / "process_group_manager.py").write_text("process_group_manager = None\n")
    (tmp_path / "picotron" / "model.py").write_text(
        "from flash_attn.ops.triton.layer_norm import layer_norm_fn\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import picotron.process_group_manager as groups

    return groups


def test_picotron_gets_no_flash_attn_and_leaves_none(project: Any) -> None:
    before = {name for name in sys.modules if name.startswith("flash_attn")}
    picotron_globals.import_picotron("recipe.model.factory")
    assert "picotron.model" in sys.modules
    assert {name for name in sys.modules if name.startswith("flash_attn")} == before


def test_picotron_refuses_shards_and_models_of_others(project: Any) -> None:
    with pytest.raises(CaseError) as error:
        picotron.parallelize(nn.Linear(2, 2), make_mesh(dp_shard=2), make_optimizer=no_optimizer)
    assert set(list_problems(error)) == {"layout.dp_shard", "layout.parallelize"}


def test_the_process_groups_of_a_model_are_set_for_its_passes(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTEN", "1")
    groups = SimpleNamespace(cp_world_size=2)
    with picotron_globals.surround(groups):
        assert project.process_group_manager is groups
        assert (os.environ["FLASH_ATTEN"], os.environ["CONTEXT_PARALLEL"]) == ("0", "1")
        torch.cuda.synchronize()
    assert os.environ["FLASH_ATTEN"] == "1"
    assert "CONTEXT_PARALLEL" not in os.environ


def test_a_rank_gets_its_part_along_the_dim_that_is_divided() -> None:
    whole = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4), "norm": nn.LayerNorm(4)})
    parts = nn.ModuleDict({"up": nn.Linear(4, 3), "down": nn.Linear(3, 4), "norm": nn.LayerNorm(4)})
    whole["norm"].weight.data.normal_()
    picotron._copy_parts(whole, parts, SimpleNamespace(tp_world_size=2, tp_rank=1))
    torch.testing.assert_close(parts["up"].weight, whole["up"].weight[3:])
    torch.testing.assert_close(parts["up"].bias, whole["up"].bias[3:])
    torch.testing.assert_close(parts["down"].weight, whole["down"].weight[:, 3:])
    torch.testing.assert_close(parts["norm"].weight, whole["norm"].weight)


def test_buckets_are_cleared_before_a_step_and_not_after_it(project: Any) -> None:
    model: Any = nn.Linear(2, 1)
    model.groups, cleared = SimpleNamespace(cp_world_size=1), []
    model.reset = lambda: cleared.append(True)
    loop = picotron.PicotronLoop(torch.optim.SGD(model.parameters(), lr=1.0), model)
    loop.zero_grad()
    loop.backward(model(torch.ones(1, 2)).sum())
    assert project.process_group_manager is model.groups
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 2))
    loop.step()
    assert cleared == [True]
