"""Fixtures: a case file, a kept run, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import ReferenceModel
from moeverify.cli import COMMANDS, build_app
from moeverify.model.init import initialize
from moeverify.model.transformer import Transformer
from moeverify.report.formats.registry import write_run
from moeverify.results.finding import CheckResult, Worst
from moeverify.results.run import CaseResult, RunResult
from moeverify.tools.weights.dcp import DcpSink
from moeverify.tools.weights.source import Chunk, Spec, cut

Invoke = Callable[..., Result]
Keep = Callable[..., Path]

CASE = """\
recipe:
  name: tiny
  model:
    vocab_size: 64
    hidden: 32
    num_layers: 2
    num_heads: 4
    num_kv_heads: 2
    head_dim: 8
    ffn_hidden: 64
layout:
  dp_shard: 2
"""


@pytest.fixture
def case_file(tmp_path: Path) -> Path:
    path = tmp_path / "fsdp2-2.yaml"
    path.write_text(CASE)
    return path


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Return a function that runs a command line. Rich output in `.stdout` has the width of a log."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)

    def do(*words: Any) -> Result:
        asked = tuple(word for word in words[:1] if word in COMMANDS)  # others are not imported, as in `main`
        return CliRunner().invoke(build_app(asked or COMMANDS), [str(word) for word in words])

    return do


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Return a distributed checkpoint that does not name its model."""
    spec = ReferenceModel.model_validate_json(json.dumps(PRESETS["tiny-mixtral-8x7b"]))
    model = Transformer(spec, dtype=torch.bfloat16)
    initialize(model, spec, 0)
    values = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def read(chunk: Chunk) -> torch.Tensor:
        return values[chunk.name][chunk.rows.start : chunk.rows.stop].clone()

    specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in values.items()}
    DcpSink(tmp_path / "start").write(cut(specs), read)
    return tmp_path / "start"


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Return a function that writes a run folder with one case of the given verdict."""

    def do(name: str, verdict: str = "pass", error: float = 1e-15) -> Path:
        worst = Worst(tensor="head.weight", error=error, bound=1e-10)
        check = CheckResult.model_validate(
            {"name": "gradient", "verdict": verdict, "tensors": 7, "worst": worst}
        )
        case = CaseResult.model_validate(
            {
                "name": "fsdp2-2",
                "file": "cases/fsdp2-2.yaml",
                "verdict": verdict,
                "ranks": 2,
                "seconds": 1.5,
                "checks": (check,),
            }
        )
        run = RunResult.model_validate(
            {"verdict": verdict, "environment": {"torch": "2.13"}, "cases": (case,)}
        )
        write_run("json", run, tmp_path / name / "result.json")
        return tmp_path / name

    return do
