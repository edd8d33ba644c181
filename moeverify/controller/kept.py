"""Rows of runs, kept in a file as they come where there is one, so that many can be run in parts. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from pydantic import ValidationError

from moeverify.errors import CaseError, FormatError, Problem


class NamedRecord(Protocol):
    """A record of one run, which has a name of its own."""

    @property
    def name(self) -> str:
        """Return the name of the run."""

    def model_dump_json(self) -> str:
        """Return the record as one line."""

    @classmethod
    def model_validate_json(cls, line: str, /) -> Self:
        """Return the record of a line; ValidationError where it is none."""


R = TypeVar("R", bound=NamedRecord)


class KeptRows(Generic[R]):
    """Rows by name, all records of one type; with a path they are those of a file, and each new one goes into it.

    The file has a line about what made the rows, then a line a run.

    Raises: CaseError where the file is of other code or another machine, FormatError where it is none of ours.
    """

    def __init__(self, path: Path | None, environment: Mapping[str, str], record: type[R]) -> None:
        self.path = path
        self.rows: dict[str, R] = {}
        self._record = record
        if path is None:
            return
        header = {"environment": dict(environment), "code": code_version()}
        if path.exists() and path.stat().st_size:
            self._read(path, header)
        else:
            path.write_text(json.dumps(header, sort_keys=True) + "\n", encoding="utf-8")

    def add(self, row: R) -> None:
        """Keep one more row."""
        self.rows[row.name] = row
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")

    def _read(self, path: Path, header: Mapping[str, object]) -> None:
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        lines = rest.split("\n")[:-1]  # without the last line's end the last line is cut off: run that again
        try:
            known = json.loads(first)
            rows = [self._record.model_validate_json(line) for line in lines]
        except (ValueError, ValidationError) as error:
            raise FormatError(f"{path}: not a file of kept runs") from error
        if known != header:
            message = f"{path} was kept by other code or on another machine"
            raise CaseError([Problem(message, "--keep", remedy="remove it, or name another file")])
        self.rows = {row.name: row for row in rows}
        if not rest.endswith("\n") and rest:
            kept = [first, *(row.model_dump_json() for row in rows)]
            path.write_text("\n".join(kept) + "\n", encoding="utf-8")


def code_version() -> str:
    """Return 16 hex digits that change with any of our code."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
