"""Rows of runs, optionally stored in a file as they arrive, so that runs can be split.

Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import ValidationError

from moeverify.checksum import seal_line
from moeverify.errors import CaseError, FormatError, Problem
from moeverify.input_file import open_input, read_sources
from moeverify.json_file import name_path, read_lines, read_problem
from moeverify.report.files import write_atomically

_REMEDY = "remove the line to run its case again, or name another file"


class NamedRecord(Protocol):
    """Interface of the record of one run, with a unique name."""

    @property
    def name(self) -> str:
        """Return the name of the run."""

    def model_dump_json(self) -> str:
        """Return the record as one line."""

    @classmethod
    def model_validate(cls, content: Any, /) -> Self:
        """Return the record of the JSON of a line. Raises: ValidationError when it is invalid."""


R = TypeVar("R", bound=NamedRecord)


class KeptRows(Generic[R]):
    """Records of one type by name. With a path, they are read from that file and new ones are appended to it.

    The file has a header line with the environment, options that change results, and the code version, then one
    line per run. Each line has a checksum (`moeverify.checksum.seal_line`).

    Raises: CaseError when the file was written by other code, with other options or on another machine, or is
    not a regular file; FormatError when it has another format or is damaged.
    """

    def __init__(self, path: Path | None, environment: Mapping[str, str], record: type[R]) -> None:
        self.path = path
        self.rows: dict[str, R] = {}
        self._record = record
        if path is None:
            return
        if path.exists() and not path.is_file():  # writing to a pipe would block until someone reads
            raise CaseError([Problem(f"{path} is no regular file", path="--keep", remedy="name another one")])
        header = {"environment": dict(environment), "code": code_version()}
        if path.exists() and path.stat().st_size:
            self._read(path, header)
        else:
            path.write_bytes(_format(json.dumps(header, sort_keys=True)))

    def add(self, row: R) -> None:
        """Add a row and append it to the file."""
        self.rows[row.name] = row
        if self.path is None:
            return
        with self.path.open("ab") as file:
            file.write(_format(row.model_dump_json()))

    def _read(self, path: Path, header: Mapping[str, object]) -> None:
        # An incomplete last line is left out, so that its case runs again.
        for number, content in read_lines(path, _REMEDY):
            if number == 1:
                if content != header:
                    message = f"{path} was kept by other code, with other options or on another machine"
                    raise CaseError(
                        [Problem(message, path="--keep", remedy="remove it, or name another file")]
                    )
                continue
            try:
                row = self._record.model_validate(content)
            except ValidationError as error:
                where, message = read_problem(error)
                raise FormatError(
                    message, _REMEDY, file=str(path), line=number, path=name_path(where)
                ) from error
            self.rows[row.name] = row
        if not _ends_whole(path):
            lines = [
                json.dumps(header, sort_keys=True),
                *(row.model_dump_json() for row in self.rows.values()),
            ]
            write_atomically(path, b"".join(map(_format, lines)))


def _format(line: str) -> bytes:
    return seal_line(line.encode()) + b"\n"


def _ends_whole(path: Path) -> bool:
    """Return whether the last line of a file is complete."""
    with open_input(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def code_version() -> str:
    """Return 16 hex digits that change with any source file of moeverify."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path, content in read_sources(root):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(content)
    return digest.hexdigest()[:16]
