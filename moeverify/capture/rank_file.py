"""Writing what a rank records, so that whatever was written stays usable."""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path

import torch
from torch import Tensor

from moeverify.capture.settings import DATA_FILE, RANK_FILE
from moeverify.results.record import Record

_ALIGNMENT = 8


class RankFile:
    """The two files of a rank. A line is written when its bytes are, so a cut-off file has no line without them."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # "x": a second process of the same rank (a script that trains in a subprocess) must not overwrite the first.
        self._lines = (folder / RANK_FILE.format(rank=rank)).open("xb")
        self._data = (folder / DATA_FILE.format(rank=rank)).open("wb")
        self._offset = 0

    def add(self, line: Record) -> None:
        """Append a line.

        Raises: OSError when the disk refuses.
        """
        self._data.flush()
        self._lines.write(line.model_dump_json(exclude_defaults=False).encode() + b"\n")
        self._lines.flush()

    def keep(self, local: Tensor) -> int:
        """Append the values of a tensor and return where they begin. Units: bytes.

        Raises: OSError when the disk refuses.
        """
        offset = self._offset
        content = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._write(self._data, content.tobytes())
        self._write(self._data, bytes(-len(content) % _ALIGNMENT))
        return offset

    def close(self) -> None:
        """Close both files; what the disk refuses now was not written before either."""
        for file in (self._data, self._lines):
            try:
                file.close()
            except OSError:
                continue

    def _write(self, file: BufferedWriter, content: bytes) -> None:
        file.write(content)
        self._offset += len(content)
