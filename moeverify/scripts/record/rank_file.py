"""Output files of a rank's record, usable up to any interruption."""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path

import torch
from torch import Tensor

from moeverify.checksum import seal_line
from moeverify.results.record import Record
from moeverify.scripts.record.settings import DATA_FILE, RANK_FILE

_ALIGNMENT = 8


class RankFile:
    """The two files of a rank. A line is written after its bytes, so every line in the file has its data."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Mode "x": another process of the same rank, such as a training subprocess, must not overwrite the
        # files.
        self._lines = (folder / RANK_FILE.format(rank=rank)).open("xb")
        self._data = (folder / DATA_FILE.format(rank=rank)).open("wb")
        self._offset = 0

    def add(self, line: Record) -> None:
        """Append a line.

        Raises: OSError when writing fails.
        """
        self._data.flush()
        self._lines.write(seal_line(line.model_dump_json(exclude_defaults=False).encode()) + b"\n")
        self._lines.flush()

    def keep(self, local: Tensor) -> int:
        """Append the values of a tensor and return their offset. Units: bytes.

        Raises: OSError when writing fails.
        """
        offset = self._offset
        content = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write(self._data, content.data)
        self._write(self._data, bytes(-len(content) % _ALIGNMENT))
        return offset

    def close(self) -> None:
        """Close both files and ignore errors of the disk."""
        for file in (self._data, self._lines):
            try:
                file.close()
            except OSError:
                continue

    def _write(self, file: BufferedWriter, content: bytes | memoryview) -> None:
        file.write(content)
        self._offset += len(content)
