"""Mixed precision under tensor parallelism: sums of activations are not taken for gradient reductions."""

from __future__ import annotations

import pytest

from moeverify.faults.setting import make_case
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def test_a_micro_batch_of_as_many_tokens_as_a_weight_has_rows_is_no_finding(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("mixed")
    # 32 tokens a micro-batch, 32 rows of q_proj on each rank of tp, and a width of 32 before both.
    small = {"model": {"num_layers": 2}, "recipe": {"precision": "mixed", "steps": 1}}
    case = make_case("mixed", **small, dp_shard=2, tp=2, micro_batches=2)
    options = RunOptions(device="cpu", golden_folder=folder / "golden", cache_folder=folder / "cache")
    result = run_cases([case], options, lambda event: None)
    assert result is not None
    (found,) = result.cases
    assert (found.verdict, found.reason, found.findings) == ("pass", "", ())
    (check,) = [check for check in found.checks if check.name == "precision"]
    assert check.tensors > 100
