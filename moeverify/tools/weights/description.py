"""The model that the weights of a folder belong to: Hugging Face's `config.json` or our `model.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from moeverify.cases.schema import ReferenceModel
from moeverify.cases.size import describe_excess
from moeverify.errors import FormatError
from moeverify.json_file import JsonFile
from moeverify.tools.weights.families import Config, Family, find_family, read_config, write_config
from moeverify.tools.weights.safetensors_index import INDEX, SINGLE

Kind = Literal["hf", "dcp", "megablocks"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CONFIG = "config.json"
MODEL = "model.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
_FORMAT = "moeverify weights 1"
_REMEDY = "take it from the model's publisher again, or give a preset"


@dataclass(frozen=True)
class Description:
    """A model, and the config.json of its weights if there is one."""

    model: ReferenceModel
    config: Config | None = None

    @property
    def family(self) -> Family:
        """Return the family of Hugging Face models that the model belongs to.

        Raises: FormatError when it belongs to none.
        """
        if self.config is not None:
            return read_config(self.config, CONFIG)[0]
        return find_family(self.model)


def find_kind(folder: Path) -> Kind:
    """Return the format of the weights in a folder.

    Raises: FormatError when the folder or its weights are missing, or the format is unknown.
    """
    if not folder.is_dir():
        raise FormatError(f"{folder}: there is no such folder; name one with weights of Hugging Face or DCP")
    if (folder / METADATA).exists():
        return "dcp"
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        raise FormatError(f"{folder}: no weights are there: none of {SINGLE}, {INDEX} and {METADATA}")
    if (folder / MODEL).exists():
        layout = _read_json(folder / MODEL).get("layout")
        if layout not in KINDS:
            raise FormatError(f"{folder / MODEL}: layout is {layout!r}, and known are {', '.join(KINDS)}")
        return "megablocks" if layout == "megablocks" else "hf"
    return "hf"


def read_description(folder: Path) -> Description:
    """Return the model of a folder's weights, from the files next to them.

    Raises: FormatError when no file describes the model.
    """
    config = _read_json(folder / CONFIG) if (folder / CONFIG).exists() else None
    if (folder / MODEL).exists():
        return _describe(_read_model(folder / MODEL), config, folder / MODEL)
    if config is None:
        raise FormatError(f"{folder}: neither {CONFIG} nor {MODEL} says which model this is; give a preset")
    return _describe(read_config(config, str(folder / CONFIG))[1], config, folder / CONFIG)


def _describe(model: ReferenceModel, config: Config | None, path: Path) -> Description:
    excess = describe_excess(model)
    if excess is not None:
        raise FormatError(f"{path}: {excess[1]}")
    return Description(model, config)


def write_description(folder: Path, kind: Kind, described: Description, dtype: str) -> None:
    """Write the description of the model next to its weights, including its config.json if it has one.

    Raises: FormatError for Hugging Face weights of a model without a family.
    """
    config = described.config
    if config is None and kind == "hf":
        config = write_config(find_family(described.model), described.model, dtype)
    if config is not None:
        _write_json(folder / CONFIG, config)
    if kind != "hf":
        fields = described.model.model_dump(mode="json")
        _write_json(folder / MODEL, {"format": _FORMAT, "layout": kind, "model": fields})


def read_config_file(path: Path) -> Description:
    """Return the model of a config.json at any path.

    Raises: FormatError.
    """
    config = _read_json(path)
    return _describe(read_config(config, str(path))[1], config, path)


def describe_preset(fields: Mapping[str, Any]) -> Description:
    """Return the model of a preset's fields."""
    return Description(ReferenceModel.model_validate_json(json.dumps(fields)))


def _read_model(path: Path) -> ReferenceModel:
    file = JsonFile.read(path, _REMEDY)
    content = file.get_object()
    if content.get("format") != _FORMAT:
        file.refuse(f"{content.get('format')!r}, and this is {_FORMAT!r}", "format")
    return file.build(ReferenceModel, "model")


def _read_json(path: Path) -> dict[str, Any]:
    return JsonFile.read(path, _REMEDY).get_object()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
