"""Weights in the Hugging Face format: safetensors with a family's names, one tensor per expert and matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moeverify.tools.weights.description import Description
from moeverify.tools.weights.safetensors_files import SafetensorsSink, SafetensorsSource
from moeverify.tools.weights.source import Spec
from moeverify.tools.weights.tensor_mapping import TensorMapping, list_tensors, map_names


def open_huggingface(folder: Path, described: Description, drop: Sequence[str] = ()) -> SafetensorsSource:
    """Return the weights of a folder; stored tensors whose keys match `drop` are left out.

    Raises: FormatError with the file and the key.
    """
    return SafetensorsSource(folder, _map(described), list_tensors(described.model), drop)


def create_huggingface(
    folder: Path, described: Description, specs: Mapping[str, Spec], shard_bytes: int
) -> SafetensorsSink:
    """Return a sink that writes the weights of a folder.

    Raises: FormatError when the model belongs to no family.
    """
    # transformers rejects a file without this entry in its header.
    metadata = {"format": "pt"}
    return SafetensorsSink(folder, _map(described), specs, shard_bytes=shard_bytes, metadata=metadata)


def _map(described: Description) -> TensorMapping:
    family = described.family
    return map_names(list_tensors(described.model), family.names, f"the family {family.model_type}")
