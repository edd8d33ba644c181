"""transformers under its own parallelism, through the ready-made adapter: what it verifies, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

from conftest import EXAMPLES, run_files

ADAPTER = "moeverify.stacks.transformers:parallelize"
# Each: further fields of the layout.
CASES = {
    "tp": "tp: 2",
    "accumulation": "tp: 2, micro_batches: 2",
    "unsized": "tp: 2, arguments: {tp_size: null, ep_size: 1}",
}


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the outcomes of `CASES` with the model of the example."""
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "recipes").mkdir()
    recipe = EXAMPLES / "stacks" / "transformers" / "recipes" / "qwen3-moe.yaml"
    (folder / "recipes" / "model.yaml").write_text(recipe.read_text())
    for name, layout in CASES.items():
        (folder / f"{name}.yaml").write_text(
            f"name: {name}\nrecipe: model\nlayout: {{{layout}, parallelize: '{ADAPTER}'}}\n"
            "checks: {repeat: never, timeout: 300.0}\n"
        )
    return run_files([folder], Path(folder))


def test_tensor_parallelism_passes_with_packed_gate_and_up_projections(hugging_face: Any) -> None:
    case = hugging_face.results["tp"]
    assert (case.verdict, case.reason) == ("pass", "")
    (use,) = next(check.facts.axes for check in case.checks if check.name == "sharding")
    assert use.num_divided > 10
    assert use.collectives["all_reduce"] > 0


def test_gradients_that_are_summed_again_in_each_micro_batch(hugging_face: Any) -> None:
    # transformers 5.23.0: after two micro-batches the first one counts tp times. A release that passes has fixed it.
    case = hugging_face.results["accumulation"]
    first = next(finding for finding in case.findings if finding.check == "gradient")
    assert first.tensor.endswith(("q_norm.weight", "k_norm.weight"))
    assert first.code == "share-weights"


def test_a_configuration_without_sizes_divides_nothing_and_fails(hugging_face: Any) -> None:
    case = hugging_face.results["unsized"]
    assert case.verdict == "mismatch"
    assert [(each.check, each.tensor) for each in case.findings] == [("sharding", "axis tp")]
