"""Saves and loads on real ranks: right ones pass, faults are detected, and refused loads change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import build_case
from moeverify.results.cause import Cause
from moeverify.results.facts import ReboundFacts
from moeverify.results.run import CaseResult
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.reshard import LayoutPair, make_pairs, run_pairs

pytestmark = pytest.mark.timeout(900)  # many jobs of two ranks, on a machine that may be busy

RECIPE = {
    "name": "reshard-test",
    "model": {"preset": "stress", "num_layers": 2, "num_dense_layers": 1},
    "data": {"batch": 4, "seq_len": 8},
    "optimizer": {"lr": 0.01, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 1},
    "precision": "float64",
    "steps": 3,
}
LAYOUT = {"dp_shard": 2, "ep": 2}

# Expected findings of each fault: tensors of the check `loaded`, and their cause.
FINDINGS = {
    "leak": ("weight/", Cause.STATE),
    "forget_options": (": lr", Cause.NOT_LOADED),
    "forget_decay": ("weight_decay", Cause.NOT_LOADED),
    "forget_generators": ("rng/", Cause.NOT_LOADED),
    "exchange_experts": ("moe.experts", Cause.PERMUTATION),
}
# The message of each refusal.
REFUSALS = {
    "flip_a_bit": ("rank-00001.safetensors", "is damaged", "checksum"),
    "cut_off": ("rank-00001.safetensors", "was cut off"),
    "remove_file": ("rank-00001.safetensors", "missing"),
    "remove_manifest": ("checkpoint.json", "never ended"),
    "put_plain_checkpoint": (".metadata", "pickle", "was not read"),
    "lose_a_key": ("has no `weight/layers.1.moe.router.bias`",),
    "save_another_shape": ("`weight/norm.weight`", "[33]", "[32]"),
    "save_of_another_recipe": ("the state of recipe 0123456789abcdef",),
}
# Expected findings of each save, besides those of the load: rebound tensors, and stale references.
REBOUND = {
    "rebind_bias": ({"layers.1.moe.router.selection_bias"}, ("checkpoint",), "buffers"),
    "rebind_norm": ({"norm.weight"}, ("checkpoint", "optimizer"), "update"),
}
IN_BACKGROUND = ("write_late", "leak")


def make_case(name: str, asynchronous: bool = False, **layout: object) -> Case:
    checkpoint = {"after": 1, "asynchronous": asynchronous}
    fields = {"name": name, "recipe": RECIPE, "layout": layout or LAYOUT, "checkpoint": checkpoint}
    return build_case(fields)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CaseResult]:
    """Return the outcome of each fault, with as few launches as possible."""
    folder = tmp_path_factory.mktemp("reshard")
    pairs, faults = {}, {}
    for name in ("write_late", *FINDINGS, *REFUSALS, *REBOUND):
        saver = make_case(f"{name}-saves", asynchronous=name in IN_BACKGROUND)
        loader = saver if name == "forget_generators" else make_case(f"{name}-loads", dp_shard=2)
        pairs[name] = LayoutPair(saver, loader)
        faults[pairs[name].name] = f"reshard_faults:{name}"
    # The second exchange happens while the save is written in the background.
    exchange = {"1": "blocks", "2": "everywhere"}
    exchanged = make_case("exchanged", True, **LAYOUT, placement="striped", exchange=exchange)
    replicas = [[0, 9, 2, 12, 4, 5, 6, 15], [8, 1, 10, 11, 3, 13, 14, 7, 0]]
    pairs["placed"] = LayoutPair(exchanged, make_case("placed", **LAYOUT, placement=replicas))
    ddp = make_case("ddp-of-four", dp_replicate=4, data_parallel="ddp")
    pairs["ddp"] = LayoutPair(ddp, ddp)
    options = RunOptions(
        device="cpu",
        folder=folder / "run",
        golden_folder=folder / "goldens",
        cache_folder=folder / "cache",
        require_goldens=False,
    )
    result = run_pairs(list(pairs.values()), options, lambda event: None, faults)
    assert result is not None
    by_name = {case.name: case for case in result.cases}
    saves = {f"save {name}": by_name.get(f"save {pair.name}") for name, pair in pairs.items()}
    assert all(save is None or name.removeprefix("save ") in REBOUND for name, save in saves.items())
    found = {name: by_name[pair.name] for name, pair in pairs.items()}
    return found | {name: save for name, save in saves.items() if save is not None}


def test_a_save_in_the_background_holds_the_state_of_its_step(results: Mapping[str, CaseResult]) -> None:
    result = results["write_late"]
    assert result.verdict == "pass", (result.reason, result.findings[:3])
    (loaded,) = [check for check in result.checks if check.name == "loaded"]
    assert loaded.tensors > 100
    assert loaded.worst is not None
    assert loaded.worst.bound == 0


def test_experts_go_from_one_placement_into_another(results: Mapping[str, CaseResult]) -> None:
    result = results["placed"]
    assert result.verdict == "pass", (result.reason, result.findings[:3])
    (loaded,) = [check for check in result.checks if check.name == "loaded"]
    assert loaded.tensors > 100


def test_ddp_goes_on_bit_for_bit(results: Mapping[str, CaseResult]) -> None:
    """After the first step DDP reorders its buckets, so sums over four ranks round in another order."""
    result = results["ddp"]
    assert result.verdict == "pass", (result.reason, result.findings[:3])
    assert "resumed" in {check.name for check in result.checks}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_was_not_restored_shows(name: str, results: Mapping[str, CaseResult]) -> None:
    tensor, cause = FINDINGS[name]
    result = results[name]
    assert result.verdict == "mismatch", result.reason
    loaded = {finding.tensor: finding for finding in result.findings if finding.check == "loaded"}
    shown = [finding for name, finding in loaded.items() if tensor in name]
    # Of tensors with one cause, the worst explains the others.
    heads = [loaded[finding.follows] if finding.follows else finding for finding in shown]
    assert heads
    assert {finding.code for finding in heads} == {cause}
    if name == "exchange_experts":
        assert "experts" in {check.name for check in result.checks if check.verdict == "mismatch"}


@pytest.mark.parametrize("name", REBOUND)
def test_what_is_bound_to_another_tensor_is_found_by_the_save(
    name: str, results: Mapping[str, CaseResult]
) -> None:
    tensors, kept_by, check = REBOUND[name]
    saved = results[f"save {name}"]
    assert saved.verdict == "mismatch", saved.reason
    found = [finding for finding in saved.findings if finding.check == "rebound"]
    assert {finding.tensor for finding in found} == tensors
    assert {(finding.step, finding.ranks, finding.facts) for finding in found} == {
        (0, (0, 1), ReboundFacts(kept_by=kept_by))
    }
    assert check in {finding.check for finding in saved.findings if finding.tensor in tensors}
    # The copy beside the checkpoint has the modules' values: the checkpoint's values differ.
    loaded = {finding.tensor for finding in results[name].findings if finding.check == "loaded"}
    assert {each.partition("/")[2] for each in loaded} >= (tensors if check == "buffers" else set())


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_and_leaves_all_as_it_was(name: str, results: Mapping[str, CaseResult]) -> None:
    result = results[name]
    assert result.verdict == "error"
    assert result.reason.startswith("not loaded: "), result.reason
    for words in REFUSALS[name]:
        assert words in result.reason


def test_a_layout_that_cannot_run_here_is_neither_loaded_nor_loaded_from(tmp_path: Path) -> None:
    pairs = make_pairs([make_case("wide", dp_shard=2)])
    options = RunOptions(
        device="cpu",
        num_ranks=1,
        golden_folder=tmp_path / "goldens",
        cache_folder=tmp_path / "cache",
        require_goldens=False,
    )
    result = run_pairs(pairs, options, lambda event: None)
    assert result is not None
    assert {case.name: case.verdict for case in result.cases} == {
        "single -> single": "pass",
        "single -> wide": "skipped",
        "wide -> single": "skipped",
        "wide -> wide": "skipped",
    }
    assert "wide cannot save here: needs 2 ranks" in next(
        case.reason for case in result.cases if case.name == "wide -> single"
    )
