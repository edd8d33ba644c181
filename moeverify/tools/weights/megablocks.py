"""Weights with megablocks' expert layout: one matrix per projection for all experts of a layer.

Notation: E experts, H hidden, F expert hidden. `experts.mlp.w1` (gate), `v1` (up) and `w2` (down) are (E *
F, H). Expert e has F rows starting at e * F; rows of `w2` are the columns of its down projection. Keys
below `layers.N.moe.` are the keys of a `dMoE` with `mlp_type="glu"`. All other tensors have our FQNs.

Source: megablocks 0.10.0, layers/glu.py and layers/router.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moeverify.errors import FormatError
from moeverify.tools.weights.description import Description
from moeverify.tools.weights.safetensors_files import SafetensorsSink, SafetensorsSource
from moeverify.tools.weights.source import Spec
from moeverify.tools.weights.tensor_mapping import Form, MappedTensor, Shape, TensorMapping, list_tensors

_EXPERTS: Mapping[str, tuple[str, Form]] = {
    ".moe.experts.gate": (".moe.experts.mlp.w1", "rows"),
    ".moe.experts.up": (".moe.experts.mlp.v1", "rows"),
    ".moe.experts.down": (".moe.experts.mlp.w2", "columns"),
}
_ROUTER = (".moe.router.weight", ".moe.router.layer.weight")


def open_megablocks(folder: Path, described: Description, drop: Sequence[str] = ()) -> SafetensorsSource:
    """Return the weights of a folder; stored tensors whose keys match `drop` are left out.

    Raises: FormatError with the file and the key.
    """
    shapes = list_tensors(described.model)
    return SafetensorsSource(folder, map_experts(shapes), shapes, drop)


def create_megablocks(
    folder: Path, described: Description, specs: Mapping[str, Spec], shard_bytes: int
) -> SafetensorsSink:
    """Return a sink that writes the weights of a folder.

    Raises: FormatError for experts with biases, which megablocks' gated experts do not have.
    """
    mapping = map_experts(list_tensors(described.model))
    return SafetensorsSink(folder, mapping, specs, shard_bytes=shard_bytes, metadata={"format": "pt"})


def map_experts(shapes: Mapping[str, Shape]) -> TensorMapping:
    """Return the mapping of a model's tensors to this layout.

    Raises: FormatError for experts with biases.
    """
    return {name: (_map_one(name, shape),) for name, shape in shapes.items()}


def _map_one(name: str, shape: Shape) -> MappedTensor:
    for ours, (theirs, form) in _EXPERTS.items():
        if name.endswith(f"{ours}_bias"):
            raise FormatError(f"megablocks' gated experts have no biases, and {name} is one")
        if name.endswith(ours):
            num_experts, first, second = shape
            size, hidden = (first, second) if form == "rows" else (second, first)
            return MappedTensor(name.removesuffix(ours) + theirs, (num_experts * size, hidden), form, size)
    if name.endswith(_ROUTER[0]):
        return MappedTensor(name.removesuffix(_ROUTER[0]) + _ROUTER[1], shape)
    return MappedTensor(name, shape)
