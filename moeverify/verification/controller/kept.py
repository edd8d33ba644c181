"""Rows of runs, optionally stored in a file as they arrive, so that runs can be split.

Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from pydantic import ValidationError

from moeverify.errors import CaseError, FormatError, Problem
from moeverify.input_file import parse_json, read_input, read_sources
from moeverify.report.files import write_atomically

_MOST_BYTES = 1 << 32  # a benchmark of thousands of runs


class NamedRecord(Protocol):
    """Interface of the record of one run, with a unique name."""

    @property
    def name(self) -> str:
        """Return the name of the run."""

    def model_dump_json(self) -> str:
        """Return the record as one line."""

    @classmethod
    def model_validate_json(cls, line: str | bytes, /) -> Self:
        """Return the record of a line. Raises: ValidationError when the line is invalid."""


R = TypeVar("R", bound=NamedRecord)


class KeptRows(Generic[R]):
    """Records of one type by name. With a path, they are read from that file and new ones are appended to it.

    The file has a header line with the environment and the code version, then one line per run.

    Raises: CaseError when the file was written by other code or on another machine, or is not a regular
    file; FormatError when it has another format or is damaged.
    """

    def __init__(self, path: Path | None, environment: Mapping[str, str], record: type[R]) -> None:
        self.path = path
        self.rows: dict[str, R] = {}
        self._record = record
        if path is None:
            return
        if path.exists() and not path.is_file():  # writing to a pipe would block until someone reads
            raise CaseError([Problem(f"{path} is no regular file", "--keep", remedy="name another one")])
        header = {"environment": dict(environment), "code": code_version()}
        if path.exists() and path.stat().st_size:
            self._read(path, header)
        else:
            path.write_text(json.dumps(header, sort_keys=True) + "\n", encoding="utf-8")

    def add(self, row: R) -> None:
        """Add a row and append it to the file."""
        self.rows[row.name] = row
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")

    def _read(self, path: Path, header: Mapping[str, object]) -> None:
        content = read_input(path, _MOST_BYTES)
        first, _, rest = content.partition(b"\n")
        try:
            known = parse_json(first)
        except ValueError as error:
            raise FormatError(f"{path}: not a file of kept runs") from error
        if known != header:
            message = f"{path} was kept by other code or on another machine"
            raise CaseError([Problem(message, "--keep", remedy="remove it, or name another file")])
        # A last line without a newline is truncated: drop it, and run that case again.
        for number, line in enumerate(rest.split(b"\n")[:-1], start=2):
            try:
                row = self._record.model_validate_json(line)
            except ValidationError as error:
                text = f"{path}:{number}: damaged, and no kept run; remove this line to run it again"
                raise FormatError(text) from error
            self.rows[row.name] = row
        if not content.endswith(b"\n"):
            whole = [first, *(row.model_dump_json().encode() for row in self.rows.values())]
            write_atomically(path, b"\n".join(whole) + b"\n")


def code_version() -> str:
    """Return 16 hex digits that change with any source file of moeverify."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path, content in read_sources(root):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(content)
    return digest.hexdigest()[:16]
