"""The golden of a recipe in git: a small sorted JSON file per recipe and device class. No torch."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from moeverify.errors import FormatError
from moeverify.input_file import parse_json, read_input, read_problem

VERSION = 1


class GoldenFile(BaseModel):
    """The recorded golden of a recipe, as one device computed it.

    `recipe` is the fingerprint of the recipe (`Recipe.fingerprint`). `losses` has the losses and gradient
    norms of every step. `tensors` has the fingerprints of logical tensors under `step/kind/name`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    name: str
    recipe: str
    device_class: str
    losses: dict[str, float]
    tensors: dict[str, list[float] | str]


def golden_path(folder: Path, recipe_name: str, device_class: str) -> Path:
    """Return the path of a recipe's golden."""
    return folder / f"{recipe_name}.{device_class}.json"


def write_golden(path: Path, golden: GoldenFile) -> None:
    """Write a golden atomically: a reader sees the old file or the new one, never a part.

    Raises: OSError when the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    for other in path.parent.glob(f".{path.name}.*"):  # of a killed process; a write takes less than a minute
        with suppress(FileNotFoundError):
            if time.time() - other.stat().st_mtime > 60.0:
                other.unlink()
    content = golden.model_dump(mode="json")
    content["tensors"] = dict(sorted(content["tensors"].items()))
    content["losses"] = dict(sorted(content["losses"].items()))
    try:
        partial.write_text(_one_line_each(content))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _one_line_each(content: dict[str, object]) -> str:
    """Return JSON with one entry per line, so that a change of one tensor changes one line of the file."""
    lines = []
    for key in sorted(content):
        value = content[key]
        if isinstance(value, dict):
            entries = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{entries}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_golden(path: Path) -> GoldenFile | None:
    """Return the golden at a path, or None if the file does not exist.

    Raises: FormatError when the file cannot be read, is truncated, or has another version.
    """
    try:
        text = read_input(path).decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    remedy = "restore it from version control, or record it anew with `moeverify golden`"
    try:
        golden = GoldenFile.model_validate(parse_json(text))
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}:{error.lineno}: not valid JSON ({error.msg})", remedy) from error
    except ValidationError as error:
        raise FormatError(": ".join((str(path), *read_problem(error))), remedy) from error
    if golden.version != VERSION:
        raise FormatError(f"{path}: version {golden.version}, this is version {VERSION}", remedy)
    return golden
