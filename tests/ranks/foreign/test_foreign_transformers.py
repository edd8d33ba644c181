"""Models of transformers under its own parallelism and under accelerate, through the ready-made adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign_cases import EXAMPLES, run_files

from moeverify.report.words.run import word_finding

# Each: the adapter, and further fields of the layout.
CASES = {
    "tp": ("transformers", "tp: 2"),
    "accumulation": ("transformers", "tp: 2, micro_batches: 2"),
    "unsized": ("transformers", "tp: 2, arguments: {tp_size: null, ep_size: 1}"),
    "accelerate": (
        "accelerate",
        "dp_shard: 2, micro_batches: 2, arguments: {auto_wrap_policy: transformer_based_wrap, "
        "transformer_cls_names_to_wrap: [Qwen3MoeDecoderLayer]}",
    ),
}


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the outcomes of `CASES` with the model of the example."""
    pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "recipes").mkdir()
    recipe = EXAMPLES / "stacks" / "transformers" / "recipes" / "qwen3-moe.yaml"
    (folder / "recipes" / "model.yaml").write_text(recipe.read_text())
    for name, (adapter, layout) in CASES.items():
        (folder / f"{name}.yaml").write_text(
            f"name: {name}\nrecipe: model\nlayout: {{{layout}, parallelize: "
            f"'moeverify.stacks.{adapter}:parallelize'}}\n"
            "checks: {repeat: never, timeout: 300.0}\n"
        )
    return run_files([folder], Path(folder), explain_seconds=0.0)


def test_tensor_parallelism_passes_with_packed_gate_and_up_projections(hugging_face: Any) -> None:
    case = hugging_face.results["tp"]
    assert (case.verdict, case.reason) == ("pass", "")
    (use,) = next(check.facts.axes for check in case.checks if check.name == "sharding")
    assert use.num_divided > 10
    assert use.collectives["all_reduce"] > 0


def test_gradients_that_are_summed_again_in_each_micro_batch(hugging_face: Any) -> None:
    # transformers 5.23.0: after two micro-batches the first counts tp times. A pass means a fix.
    case = hugging_face.results["accumulation"]
    first = next(finding for finding in case.findings if finding.check == "gradient")
    assert first.tensor.endswith(("q_norm.weight", "k_norm.weight"))
    assert first.code == "share-weights"
    assert "micro-batch 0 by 2" in word_finding(first).cause


def test_a_configuration_without_sizes_divides_nothing_and_fails(hugging_face: Any) -> None:
    case = hugging_face.results["unsized"]
    assert case.verdict == "mismatch"
    assert [(each.check, each.tensor) for each in case.findings] == [("sharding", "axis tp")]


def test_accelerate_prepares_model_and_optimizer_and_carries_out_the_steps(hugging_face: Any) -> None:
    case = hugging_face.results["accelerate"]
    assert (case.verdict, case.reason) == ("pass", "")
    (use,) = next(check.facts.axes for check in case.checks if check.name == "sharding")
    assert use.axis == "dp_shard"
    assert use.num_divided == use.num_parameters
