"""Weights on disk for tests, written and read by the format libraries themselves."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import ReferenceModel
from moeverify.model.init import initialize
from moeverify.model.transformer import Transformer

HF_PRESETS = [
    "tiny-mixtral-8x7b",
    "tiny-qwen2-57b-a14b",
    "tiny-qwen3-30b-a3b",
    "tiny-olmoe-1b-7b",
    "tiny-deepseek-v2",
    "tiny-deepseek-v2-lite",
    "tiny-deepseek-v3",
    "tiny-glm-4.5-air",
    "tiny-minimax-m2",
]


def make_spec(preset: str) -> ReferenceModel:
    return ReferenceModel.model_validate_json(json.dumps(PRESETS[preset]))


def make_weights(preset: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return the values of all tensors of a preset; a selection bias is float32, as DeepSeek publishes it."""
    spec = make_spec(preset)
    model = Transformer(spec, dtype=torch.float64)
    initialize(model, spec, 3)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith("selection_bias"):
            tensor.copy_(torch.linspace(-1, 1, len(tensor)))
    return {
        name: tensor.to(torch.float32 if name.endswith("selection_bias") else dtype)
        for name, tensor in weights.items()
    }


def save_dcp(folder: Path, preset: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Write a preset's weights as a torch-only program would, and return them."""
    weights = make_weights(preset, dtype)
    write_dcp(folder, weights)
    return weights


def write_dcp(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write a distributed checkpoint as torch does."""
    with warnings.catch_warnings(action="ignore"):  # it warns about the single process
        dcp.save(dict(weights), checkpoint_id=folder, no_dist=True)


def read_dcp(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read a distributed checkpoint as torch does."""
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Read all safetensors files of a folder, as the library does."""
    return {
        key: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }


def read_bytes(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
