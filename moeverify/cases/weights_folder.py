"""Folder with the initial weights of a recipe: existence check and content hash. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Files that mark a folder of weights: one file of Hugging Face or megablocks, several files, or torch DCP.
MARKS = ("model.safetensors", "model.safetensors.index.json", ".metadata")
# Files that a model is loaded from: tensors, index files, and metadata with names.
_SUFFIXES = (".safetensors", ".safetensors.index.json", ".distcp")
_NAMES = (".metadata", "config.json", "model.json")


def find_problem(folder: Path) -> str:
    """Return why a folder has no weights, or an empty string if it appears to have some."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if not any((folder / mark).exists() for mark in MARKS):
        return f"{folder} has none of {', '.join(MARKS)}"
    return ""


def hash_weights(folder: Path) -> str:
    """Return 16 hex digits that change with any file of the weights. A missing folder also has a hash.

    Reads the content of every file at about 1 GB/s, once per process for each size and modification time.
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
    del size, changed  # Part of the cache key: a modified file is read again.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
