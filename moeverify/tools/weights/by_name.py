"""Loading weights of a folder into any model by FQN, from safetensors files or DCP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from moeverify.errors import FormatError
from moeverify.parallel.regions.local_shard import LocalShard, buffers, parameters
from moeverify.tools.weights.dcp import DcpSource
from moeverify.tools.weights.description import find_kind
from moeverify.tools.weights.load import LoadedWeights, fill_shards
from moeverify.tools.weights.safetensors_files import SafetensorsSource
from moeverify.tools.weights.source import WeightSource
from moeverify.tools.weights.tensor_mapping import MappedTensor, TensorMapping


def load_by_name(model: nn.Module, folder: Path) -> LoadedWeights:
    """Fill the parameters and persistent buffers of a model with the stored tensors of the same name.

    A tied parameter is read under any of its names.
    Integer buffers keep their values. Returns the number of tensors and bytes read.

    Raises: FormatError with the file and every tensor that is missing, unexpected or of another shape.
    """
    saved = model.state_dict()
    shards = [
        shard for shard in (*parameters(model), *buffers(model)) if shard.name in saved and _is_filled(shard)
    ]
    shapes = {shard.name: shard.region.shape for shard in shards}
    left_out = [name for name in saved if name not in shapes]
    named = dict(model.named_parameters(remove_duplicate=False))
    tied: list[TensorMapping] = [
        {name: (MappedTensor(other, shapes[name]),)}
        for other in left_out
        for name in shapes
        if named.get(other, other) is named.get(name)
    ]
    return fill_shards(shards, _open(folder, shapes, left_out, tied), folder, None)


def _is_filled(shard: LocalShard) -> bool:
    return shard.tensor.is_floating_point()


def _open(
    folder: Path, shapes: dict[str, tuple[int, ...]], left_out: list[str], tied: Sequence[TensorMapping]
) -> WeightSource:
    kind = find_kind(folder)
    if kind == "dcp":
        return DcpSource(folder, shapes, left_out)
    if kind == "megablocks":
        raise FormatError(f"{folder}: a folder for megablocks has no names of a model of your own")
    mapping = {name: (MappedTensor(name, shape),) for name, shape in shapes.items()}
    return SafetensorsSource(folder, mapping, shapes, left_out, tied)
