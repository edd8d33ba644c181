"""The rotary embedding in a Hugging Face config.json, in the older form and the form of transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeverify.cases.schema import ReferenceModel
from moeverify.errors import FormatError

_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
_KNOWN = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "partial_rotary_factor",
}  # fmt: skip


def read_rotary(
    config: Mapping[str, Any], file: str, defaults: Mapping[str, Any], *, latent: bool, head_dim: Any
) -> dict[str, Any]:
    """Return `rope_theta` and, if present, `rotary_dim` and `yarn` as fields of the reference model.

    `defaults` are those of the family. `latent` models scale their scores by `mscale_all_dim` and have
    channels of their own for the rotary embedding; other attention does not.

    Raises: FormatError for an embedding that the reference model does not support.
    """
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    rotary: dict[str, Any] = {**(older or {}), **(newer or {})}
    theta = rotary.get("rope_theta", config.get("rope_theta", defaults.get("rope_theta", 10000.0)))
    read = {"rope_theta": theta} | ({} if latent else _read_part(config, rotary, defaults, head_dim))
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    where = f"{file}: {'rope_parameters' if newer else 'rope_scaling'}"
    if kind == "default":
        return read
    if kind != "yarn":
        raise FormatError(f"{where}: the type {kind!r} is neither default nor yarn")
    unknown = sorted(key for key, value in rotary.items() if key not in _KNOWN and value is not None)
    if unknown:
        raise FormatError(f"{where}: {unknown[0]} is not supported")
    for key in ("factor", "original_max_position_embeddings"):
        if rotary.get(key) is None:
            raise FormatError(f"{where}: {key} is missing")
    scales = [rotary.get("mscale") or 0.0, rotary.get("mscale_all_dim") or 0.0]
    if bool(scales[0]) != bool(scales[1]) and latent:
        raise FormatError(f"{where}: mscale and mscale_all_dim stand together or not at all")
    both = all(scales)
    return {
        **read,
        "yarn": {
            "factor": rotary["factor"],
            "original_length": rotary["original_max_position_embeddings"],
            **{key: rotary.get(key) or default for key, default in _YARN.items()},
            "mscale": scales[0] if both else 1.0,
            "mscale_all_dim": scales[1] if both else 0.0,
        },
    }


def _read_part(
    config: Mapping[str, Any], rotary: Mapping[str, Any], defaults: Mapping[str, Any], head_dim: Any
) -> dict[str, Any]:
    """Return `rotary_dim` where the rotary embedding turns a part of each head."""
    key = "partial_rotary_factor"
    factor = rotary.get(key, config.get(key, defaults.get(key, 1.0)))
    if not isinstance(head_dim, int) or not isinstance(factor, int | float):
        return {}
    # only some families read it
    dim = config.get("rotary_dim") if "rotary_dim" in defaults else None
    dim = int(head_dim * factor) if dim is None else dim
    return {} if dim == head_dim else {"rotary_dim": dim}


def write_rotary(model: ReferenceModel) -> dict[str, Any]:
    """Return the keys of config.json, in the form that every version of transformers reads."""
    keys: dict[str, Any] = {"rope_theta": model.rope_theta}
    if model.mla is None:
        keys["partial_rotary_factor"] = (model.rotary_dim or model.head_dim) / model.head_dim
    if model.yarn is None:
        return keys
    yarn = model.yarn
    scaling: dict[str, Any] = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    if yarn.mscale_all_dim > 0:
        scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    length = int(yarn.factor * yarn.original_length)
    return {**keys, "rope_scaling": scaling, "max_position_embeddings": length}
