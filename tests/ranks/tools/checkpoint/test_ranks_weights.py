"""Each of four real ranks reads its own slices of a folder, into every kind of layout, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import Data, Layout, Recipe, ReferenceModel
from moeverify.model.init import initialize
from moeverify.model.transformer import Transformer
from moeverify.tools.weights.dcp import DcpSink
from moeverify.tools.weights.description import Description
from moeverify.tools.weights.source import Chunk, Spec, cut
from moeverify.tools.weights.stream import convert
from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job

LAYOUTS = {
    "fsdp + tp + ep": Layout(dp_shard=2, tp=2, ep=2, sequence_parallel=True),
    "experts cut both ways": Layout(dp_shard=2, tp=2, ep=2, etp=2),
    "fsdp2 + ep": Layout(dp_shard=4, ep=2),
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
    "fsdp1": Layout(dp_shard=4, data_parallel="fsdp1"),
}
KINDS = ("hf", "megablocks", "dcp")
PRESET, OTHER = "tiny-deepseek-v3", "tiny-deepseek-v2"


def make_spec(preset: str) -> ReferenceModel:
    return ReferenceModel.model_validate_json(json.dumps(PRESETS[preset]))


def write_folders(root: Path, preset: str) -> dict[str, Path]:
    """Write the weights of a preset in every format, and as whole tensors."""
    spec = make_spec(preset)
    model = Transformer(spec)
    initialize(model, spec, 17)
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    torch.save(whole, root / f"{preset}.pt")
    specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}

    def read(chunk: Chunk) -> torch.Tensor:
        return whole[chunk.name][chunk.rows.start : chunk.rows.stop].clone()

    folders = {kind: root / f"{preset}-{kind}" for kind in KINDS}
    start = root / f"{preset}-start"
    DcpSink(start).write(cut(specs), read)
    for kind, folder in folders.items():
        convert(start, folder, kind, described=Description(spec), shard_bytes=200_000)  # type: ignore[arg-type]
    return {**folders, "whole": root / f"{preset}.pt"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return the findings under each layout, for each format."""
    root = tmp_path_factory.mktemp("weights")
    folders, others = write_folders(root, PRESET), write_folders(root, OTHER)
    jobs = []
    for title, layout in LAYOUTS.items():
        for kind in KINDS:
            recipe = Recipe(name="weights", model=make_spec(PRESET), data=Data(batch=4, seq_len=8), seed=5)
            payload = {
                "recipe": recipe.model_dump_json(),
                "layout": layout.model_dump_json(),
                "folder": str(folders[kind]),
                "other": str(others[kind]),
                "whole": str(folders["whole"]),
            }
            jobs.append(Job(name=f"{title}, {kind}", num_ranks=4, payload=payload))
    entry = str(Path(__file__).with_name("rank_weights.py"))
    outcomes = run_jobs(jobs, entry=entry, folder=root)
    return {job.name: outcome.result or outcome for job, outcome in zip(jobs, outcomes, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("title", LAYOUTS)
def test_every_rank_has_what_is_its_own(title: str, kind: str, found: Mapping[str, Any]) -> None:
    result = found[f"{title}, {kind}"]
    assert result["wrong"] == []
    assert len(result["held"]) == 4


@pytest.mark.parametrize("kind", ["hf", "megablocks"])
@pytest.mark.parametrize("title", LAYOUTS)
def test_a_rank_reads_little_but_its_own(title: str, kind: str, found: Mapping[str, Any]) -> None:
    result = found[f"{title}, {kind}"]
    # FSDP1 cuts in the middle of rows, and a row is the smallest unit that is read.
    most = 1.1 if title == "fsdp1" else 1.0
    assert result["asked"] == result["read"]  # counted at the library call, and by the loader
    for read, held in zip(result["asked"], result["held"], strict=True):
        assert held <= read <= most * held
        assert read < 0.6 * result["total"]
