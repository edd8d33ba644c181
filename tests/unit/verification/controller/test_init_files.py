"""Files of `moeverify init`: valid cases, a mark in each, and edited ones left alone."""

from __future__ import annotations

import ast
from pathlib import Path

from moeverify.cases.validation.load import load_cases
from moeverify.results.factory import TriedModel
from moeverify.results.finding import Finding
from moeverify.results.run import CaseResult
from moeverify.verification.controller.init import Tried, combine, list_candidates
from moeverify.verification.controller.init_files import (
    is_edited,
    list_files,
    name_recipe,
    write_files,
)

MODEL = TriedModel(
    title="Qwen3MoeForCausalLM",
    framework="transformers",
    factory="moeverify.stacks.transformers:make",
    arguments={"model_type": "qwen3_moe", "hidden_size": 64, "rope_parameters": {"rope_type": "default"}},
    vocab_size=64,
    changes={"hidden_size": (2048, 64)},
    parameters=(10**9, 10**5),
    seconds=0.1,
    parallelize="my.model:parallelize",
    expert_degrees=("ep_size",),
)


def test_written_files_are_valid_cases_with_comments(tmp_path: Path) -> None:
    candidates = list_candidates(MODEL)
    states = dict(write_files(tmp_path, list_files(tmp_path, "verify", MODEL, candidates)))
    assert set(states.values()) == {"written"}
    cases = load_cases([tmp_path / "verify"])
    assert len(cases) == len(candidates) == 10
    by_name = {case.name: case for case in cases}
    experts = by_name["qwen3-moe-for-causal-lm-tp-ep"]
    assert (experts.layout.tp, experts.layout.arguments) == (2, {"ep_size": 2})
    assert experts.recipe.model.model_dump()["arguments"] == MODEL.arguments
    text = Path(experts.file).read_text()
    assert all("  # " in line for line in text.splitlines() if line.startswith("  "))
    assert (
        "# hidden_size: 2048 in your model, 64 here"
        in (tmp_path / "verify" / "recipes" / f"{name_recipe(MODEL)}.yaml").read_text()
    )
    ast.parse((tmp_path / "tests" / "test_layouts.py").read_text())


def test_a_second_time_only_unedited_files_change(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    own = tmp_path / "tests" / "test_layouts.py"
    own.write_text("def test_mine() -> None: ...\n")
    candidates = list_candidates(MODEL)[:2]
    first = dict(write_files(tmp_path, list_files(tmp_path, "verify", MODEL, candidates)))
    assert first[Path("tests/test_layouts.py")] == "edited"
    again = dict(write_files(tmp_path, list_files(tmp_path, "verify", MODEL, candidates)))
    assert {state for path, state in again.items() if path.suffix == ".yaml"} == {"unchanged"}
    edited = next(tmp_path.glob("verify/*-ddp.yaml"))
    edited.write_text(edited.read_text() + "checks: {repeat: never}\n")
    assert is_edited(edited.read_text())
    wider = MODEL.model_copy(update={"vocab_size": 128})
    third = dict(write_files(tmp_path, list_files(tmp_path, "verify", wider, candidates)))
    assert third[edited.relative_to(tmp_path)] == "edited"
    assert third[Path("verify/recipes/qwen3-moe-for-causal-lm.yaml")] == "updated"
    assert edited.read_text().endswith("repeat: never}\n")
    assert own.read_text() == "def test_mine() -> None: ...\n"


def test_four_ranks_combine_only_axes_that_passed() -> None:
    names = ("own-dp-replicate", "own-dp-shard", "own-tp", "own-cp", "own-ep-size")
    own = [each for each in list_candidates(MODEL) if each.name in names]

    def end(verdict: str, code: str = "") -> CaseResult:
        finding = Finding(
            check="sharding", tensor="x", step=0, rank=0, error=1.0, bound=0.0, code=code, cause="unused"
        )
        findings = [finding] if code else []
        return CaseResult.model_validate(
            {"name": "a", "file": "", "verdict": verdict, "ranks": 2, "seconds": 1.0, "findings": findings}
        )

    ends = [end("mismatch"), end("pass"), end("pass"), end("mismatch", "layout"), end("pass")]
    tried = [Tried(candidate, result) for candidate, result in zip(own, ends, strict=True)]
    assert [(each.name, each.layout["parallelize"]) for each in combine(tried)] == [
        ("own-dp-shard-tp", "my.model:parallelize")
    ]
    assert [each.obstacle for each in tried] == ["", "", "", "unused", ""]
