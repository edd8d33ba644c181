"""Weights in the Hugging Face format: safetensors with a family's names, one tensor per expert and matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from moeverify.tools.weights.description import Description
from moeverify.tools.weights.safetensors_files import SafetensorsSink, SafetensorsSource
from moeverify.tools.weights.source import Spec
from moeverify.tools.weights.tensor_mapping import MappedTensor, TensorMapping, list_tensors, map_names


def open_huggingface(folder: Path, described: Description, drop: Sequence[str] = ()) -> SafetensorsSource:
    """Return the weights of a folder; stored tensors whose keys match `drop` are left out.

    Raises: FormatError with the file and the key.
    """
    mapping = _map(described)
    return SafetensorsSource(
        folder, mapping, list_tensors(described.model), drop, list(_list_others(mapping))
    )


def create_huggingface(
    folder: Path, described: Description, specs: Mapping[str, Spec], shard_bytes: int
) -> SafetensorsSink:
    """Return a sink that writes the weights of a folder.

    Raises: FormatError when the model belongs to no family.
    """
    # transformers rejects a file without this entry in its header.
    metadata = {"format": "pt"}
    return SafetensorsSink(folder, _map(described), specs, shard_bytes=shard_bytes, metadata=metadata)


def _list_others(mapping: TensorMapping) -> Iterator[TensorMapping]:
    """Yield other ways to store the tensors: with the modules of transformers 5, and tied under the other name.

    transformers 5 computes with fused experts, and saves them so with `save_original_format=False`. Its MoE
    block is `mlp` in every family.
    """
    renamed = {
        name: tuple(replace(each, key=each.key.replace(".block_sparse_moe.", ".mlp.")) for each in parts)
        for name, parts in mapping.items()
    }
    yield renamed
    yield {
        name: (_fuse(parts[0], len(parts), name.rpartition(".")[2]),)
        for name, parts in renamed.items()
        if parts[0].form == "row"
    }
    yield {"embed.weight": (replace(mapping["embed.weight"][0], key="lm_head.weight"),)}


def _fuse(first: MappedTensor, num_experts: int, part: str) -> MappedTensor:
    """Return the tensor of all experts with `gate`, `up` or `down`."""
    prefix = first.key[: first.key.index(".experts.") + len(".experts.")]
    rows, columns = first.shape
    if part == "down":
        return MappedTensor(f"{prefix}down_proj", (num_experts, rows, columns))
    start = rows if part == "up" else 0
    return MappedTensor(f"{prefix}gate_up_proj", (num_experts, 2 * rows, columns), "half", start)


def _map(described: Description) -> TensorMapping:
    family = described.family
    return map_names(list_tensors(described.model), family.names, f"the family {family.model_type}")
