"""A conversion holds a few chunks in memory, for any size of tensors and model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moeverify.cases.schema import MoE, ReferenceModel
from moeverify.tools.weights import source
from moeverify.tools.weights.description import Description, write_description
from moeverify.tools.weights.source import Chunk, Spec, cut
from moeverify.tools.weights.stream import _create, convert
from moeverify.tools.weights.tensor_mapping import list_tensors

pytestmark = [pytest.mark.ranks, pytest.mark.slow]  # each conversion is a separate process

PIECE = 8 * 2**20
MODEL = ReferenceModel(
    vocab_size=32768,
    hidden=1024,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
    ffn_hidden=1024,
    moe=MoE(num_experts=16, top_k=2, expert_hidden=1024),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the weights of a 235 MB model in every format; its largest tensor has 67 MB."""
    root = tmp_path_factory.mktemp("memory")
    specs = {name: Spec(shape, torch.bfloat16) for name, shape in list_tensors(MODEL).items()}
    assert sum(spec.num_bytes for spec in specs.values()) > 230e6
    assert max(spec.num_bytes for spec in specs.values()) > 8 * PIECE - 1

    def read(chunk: Chunk) -> torch.Tensor:
        return torch.full([len(indices) for indices in chunk.box], 0.5, dtype=torch.bfloat16)

    described = Description(MODEL)
    (root / "hf").mkdir()
    write_description(root / "hf", "hf", described, "bfloat16")
    _create(root / "hf", "hf", described, specs, 10**9).write(cut(specs), read)
    convert(root / "hf", root / "megablocks", "megablocks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "CHUNK_BYTES", PIECE)
        convert(root / "hf", root / "dcp", "dcp")
    return {kind: root / kind for kind in ("hf", "megablocks", "dcp")}


# Each format read once and written once.
@pytest.mark.parametrize(("kind", "to"), [("hf", "dcp"), ("dcp", "megablocks"), ("megablocks", "hf")])
def test_memory_is_bounded_by_pieces(kind: str, to: str, folders: dict[str, Path], tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.symlink_to(folders[kind])
    script = Path(__file__).with_name("measure_peak.py")
    command = [sys.executable, str(script), str(start), to, str(PIECE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # A chunk, its source (mapped, or the stored chunk), and a writer's copy of it; imports and objects made
    # at first use take 27 MB.
    assert int(done.stdout) < 4 * PIECE + 40e6
