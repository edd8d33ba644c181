"""Layers in float8 under real layouts: clean ones agree with the definition, and bugs of scales are named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moeverify.cases.schema import Case
from moeverify.faults import setting
from moeverify.results.run import CaseResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import run_cases

SHARP = {"float8": "rowwise_with_gw_hp"}
MIXED = {"float8": "rowwise", "precision": "mixed"}
ONE_SCALE = {"float8": "tensorwise", "precision": "bfloat16"}


def make_case(name: str, **options: Any) -> Case:
    """Return a case with one dense layer and one with experts."""
    return setting.make_case(name, **{"model": {"num_layers": 2}, **options})


CLEAN: Mapping[str, Case] = {
    "tp-sp": make_case("tp-sp", recipe=SHARP, tp=2, sequence_parallel=True, loss_parallel=True),
    "ddp": make_case("ddp", recipe=SHARP, dp_replicate=2, data_parallel="ddp", micro_batches=2),
    "fsdp1": make_case("fsdp1", recipe=SHARP, dp_shard=2, data_parallel="fsdp1", recompute=True),
    "pp": make_case("pp", recipe=SHARP, pp=2, micro_batches=4, stage_layers=(1, 1)),
    "latent": make_case("latent", preset="tiny-deepseek-v3", recipe=SHARP, tp=2, ep=2),
    "float32": make_case("float32", recipe={**SHARP, "precision": "float32"}, cp=2),
    "mixed": make_case("mixed", recipe=MIXED, dp_shard=2, ep=2, micro_batches=2),
    "one-scale": make_case("one-scale", recipe=ONE_SCALE, tp=2),
}
BROKEN: Mapping[str, tuple[Case, str]] = {
    "own-part": (make_case("own-part", recipe=ONE_SCALE, tp=2), "keep_to_own_part"),
    "stale": (make_case("stale", recipe=MIXED, dp_shard=2), "use_last_step"),
    "another": (
        make_case(
            "another", recipe={**ONE_SCALE, "precision": "float32"}, dp_replicate=2, data_parallel="ddp"
        ),
        "use_layer_before",
    ),
    "left-out": (make_case("left-out", recipe=MIXED, dp_shard=2), "forget_feed_forward"),
    "sharp": (make_case("sharp", recipe=SHARP, dp_shard=2), "use_last_step"),
    "lost-part": (make_case("lost-part", recipe=MIXED, dp_shard=2), "lose_a_part"),
    "lost-rank": (make_case("lost-rank", recipe=MIXED, dp_shard=2), "lose_a_rank"),
}

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CaseResult]:
    """Return the results of the cases, all run in one launch of two ranks."""
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("float8")
    options = RunOptions(
        device="cpu",
        golden_folder=folder / "golden",
        cache_folder=folder / "cache",
        require_goldens=False,
        case_faults={name: f"float8_faults:{fault}" for name, (_, fault) in BROKEN.items()},
        explain_seconds=0.0,  # these tests are about the checks
    )
    with pytest.MonkeyPatch.context() as patch:
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        result = run_cases(
            [*CLEAN.values(), *(case for case, _ in BROKEN.values())], options, lambda event: None
        )
    assert result is not None
    return {case.name: case for case in result.cases}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_layout_passes(results: Mapping[str, CaseResult], name: str) -> None:
    case = results[name]
    assert (case.verdict, case.findings) == ("pass", ())
    (check,) = [check for check in case.checks if check.name == "float8"]
    assert check.tensors > 40


def test_in_float64_layouts_agree_with_the_definition_to_rounding(results: Mapping[str, CaseResult]) -> None:
    for name in ("tp-sp", "ddp", "fsdp1", "pp", "latent"):
        (gradients,) = [check for check in results[name].checks if check.name == "gradient"]
        assert gradients.limits is not None
        assert gradients.limits.worst < 1e-9, name


def test_scales_that_are_not_reduced_over_tp_are_named(results: Mapping[str, CaseResult]) -> None:
    lead = results["own-part"].lead
    assert lead is not None
    assert (lead.check, lead.code, lead.place.axes) == ("float8", "missing-reduction", ("tp",))
    assert lead.facts.source == "own-rank"


@pytest.mark.parametrize("name", ["stale", "sharp"])
def test_scales_of_the_step_before_are_named(results: Mapping[str, CaseResult], name: str) -> None:
    found = [each for each in results[name].findings if each.check == "float8"]
    assert {each.step for each in found} == {1}, "in the first step there is none before"
    assert {each.facts.source for each in found} == {"step-before"}
    (stale,) = found
    assert {"input", "grad_output"} <= set(stale.facts.operands)


def test_a_scale_of_another_tensor_is_named_with_it(results: Mapping[str, CaseResult]) -> None:
    found = [each for each in results["another"].findings if each.check == "float8"]
    assert {each.facts.operands for each in found} == {("weight",)}
    assert any(each.facts.other.endswith("proj weight") for each in found)


def test_layers_left_out_of_float8_are_named(results: Mapping[str, CaseResult]) -> None:
    found = [each for each in results["left-out"].findings if each.check == "float8"]
    assert [(each.tensor, each.facts.source) for each in found] == [("layers.0.mlp", "none")]


def test_what_computes_with_wrong_scales_follows_in_float64(results: Mapping[str, CaseResult]) -> None:
    assert {"loss", "gradient"} <= {each.check for each in results["sharp"].findings}


@pytest.mark.parametrize(("name", "least"), [("mixed", 50), ("float32", 1)])
def test_sums_of_all_ranks_decide_what_the_noise_hides(
    results: Mapping[str, CaseResult], name: str, least: int
) -> None:
    (gradients,) = [check for check in results[name].checks if check.name == "gradient"]
    (sums,) = [check for check in results[name].checks if check.name == "gradient sum"]
    assert sums.limits is not None
    assert sums.limits.worst < 0.1
    assert gradients.recomputed >= least
    names = {each.tensor for each in gradients.inconclusive_tensors}
    assert not [each for each in names if "attention" in each or ".shared" in each or "norm" in each]


def test_a_part_that_is_lost_within_the_noise_is_seen_in_the_sum_alone(
    results: Mapping[str, CaseResult],
) -> None:
    found = results["lost-part"].findings
    assert {(each.check, each.tensor) for each in found} == {
        ("gradient sum", "layers.0.attention.k_norm.weight")
    }
    assert dict(found[0].facts.factors) == {0: pytest.approx(1.0, abs=0.02), 1: pytest.approx(0.7, abs=0.02)}


def test_a_rank_that_a_sum_lacks_is_named(results: Mapping[str, CaseResult]) -> None:
    lead = results["lost-rank"].lead
    assert lead is not None
    found = [each for each in results["lost-rank"].findings if each.check == "gradient sum"]
    assert {each.facts.left_out for each in found if each.step == 0} == {(1,)}
    assert lead.code == "share-weights"
