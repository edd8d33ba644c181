"""A folder of weights that a recipe starts from, as far as files go: what is there, and a hash of it. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# What makes a folder one of weights: of Hugging Face or megablocks, of several files, of torch's DCP.
MARKS = ("model.safetensors", "model.safetensors.index.json", ".metadata")
# What a model is read from: its values, which file has which, and what the values are called.
_SUFFIXES = (".safetensors", ".safetensors.index.json", ".distcp")
_NAMES = (".metadata", "config.json", "model.json")


def find_problem(folder: Path) -> str:
    """Return why a folder has no weights; nothing where it seems to have some."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if not any((folder / mark).exists() for mark in MARKS):
        return f"{folder} has none of {', '.join(MARKS)}"
    return ""


def hash_weights(folder: Path) -> str:
    """Return 16 hex digits that change whenever a file of the weights does; of a folder that is not there too.

    The content of every file is read, about 1 GB a second, once for each size and time of change in a process.
    """
    digest = hashlib.sha256()
    for path in _list_files(folder):
        found = path.stat()
        digest.update(
            f"{path.name} {found.st_size} {_hash_file(path, found.st_size, found.st_mtime_ns)}\n".encode()
        )
    return digest.hexdigest()[:16]


def _list_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_file() and (path.name in _NAMES or path.name.endswith(_SUFFIXES)):
                yield path


@cache
def _hash_file(path: Path, size: int, changed: int) -> str:
    del size, changed  # parts of the key: a file that was written again is read again
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
