"""Index of the tensors in a folder of safetensors files, checked against a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from moeverify.dtype_names import DTYPES
from moeverify.errors import FormatError, join_problems
from moeverify.input_file import is_file_name, open_input
from moeverify.json_file import JsonFile
from moeverify.tools.weights.tensor_mapping import Shape, TensorMapping, choose_stored

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Rotary frequencies in old checkpoints, which follow from the configuration.
_REDUNDANT = ("*.rotary_emb.inv_freq",)


@dataclass(frozen=True)
class TensorLocation:
    """The file, shape and dtype of a stored tensor."""

    file: Path
    shape: Shape
    dtype: torch.dtype


def read_index(
    folder: Path, mappings: Sequence[TensorMapping], drop: Sequence[str]
) -> tuple[dict[str, TensorLocation], TensorMapping]:
    """Return the place of every stored tensor, and for each of our tensors the mapping that fits.

    Stored tensors of no mapping must match `drop`. Files whose tensors all match it are not opened.

    Raises: FormatError with the file and the key.
    """
    patterns = (*_REDUNDANT, *drop)

    def is_dropped(key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    files = {
        path: (_read_headers(path), listed or ())
        for path, listed in _list_files(folder).items()
        if listed is None or not all(map(is_dropped, listed))
    }
    mapping = choose_stored(mappings, {key for found, _ in files.values() for key in found})
    shapes = {mapped.key: mapped.shape for parts in mapping.values() for mapped in parts}
    places: dict[str, TensorLocation] = {}
    problems: list[str] = []
    for path, (found, listed) in files.items():
        for key in listed:
            if key not in found and (key in shapes or not is_dropped(key)):
                problems.append(f"{path}: {key} is missing, which {INDEX} says is there")
        for key, place in found.items():
            if key in places:
                problems.append(f"{path}: {key} is also in {places[key].file.name}")
            if key in shapes and place.shape != shapes[key]:
                problems.append(f"{path}: {key} has shape {place.shape}, and the model {shapes[key]}")
            if key in shapes:
                places[key] = place
            elif not is_dropped(key):
                problems.append(f"{path}: {key} is no tensor of this model; --drop leaves tensors out")
    problems += [f"{folder}: {key} is in no file" for key in shapes if key not in places]
    if problems:
        raise FormatError(join_problems(problems))
    return places, mapping


def _list_files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files of a folder, each with its keys in the index, or None without an index."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise FormatError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
        return {folder / SINGLE: None}
    file = JsonFile.read(index, "take it from the model's publisher again")
    weight_map = file.get_object().get("weight_map")
    if not isinstance(weight_map, dict):
        file.refuse("expected an object with the file of each tensor", "weight_map")
    listed: dict[Path, list[str] | None] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not is_file_name(name):
            file.refuse(f"{name!r:.80} is no name of a file in this folder", "weight_map", key)
        keys = listed.setdefault(folder / name, [])
        assert keys is not None
        keys.append(key)
    return listed


def _read_headers(path: Path) -> Mapping[str, TensorLocation]:
    try:
        open_input(path).close()
        places = {}
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(key)
                code = part.get_dtype()
                if code not in DTYPES:
                    raise FormatError(f"{path}: {key} has the dtype {code}, which is not supported")
                places[key] = TensorLocation(path, tuple(part.get_shape()), DTYPES[code])
    except FileNotFoundError:
        raise FormatError(f"{path}: the file is missing") from None
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path}: it is no whole safetensors file ({error})") from None
    return places
