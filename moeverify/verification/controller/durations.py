"""Durations of cases in earlier runs on this machine, for estimates of the remaining time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from moeverify.report.files import write_atomically
from moeverify.results.run import CaseResult
from moeverify.verification.controller.machine import default_cache
from moeverify.verification.controller.options import RunOptions

_FILE = "durations.json"
_MOST = 10_000  # cases to remember, the most recent ones
# reject implausible values as damage
_CONTENT = TypeAdapter(dict[str, Annotated[float, Field(ge=0.0, le=1e9)]])


@dataclass(frozen=True)
class Durations:
    """The file of case durations in seconds, stored next to the full goldens.

    It is only a hint: an unreadable file counts as empty, and write errors are ignored.
    """

    path: Path
    device: str

    @classmethod
    def of(cls, options: RunOptions) -> Durations:
        """Return the durations of cases on the device that the options request."""
        return cls((options.cache_folder or default_cache()) / _FILE, options.device)

    def read(self, names: Iterable[str]) -> dict[str, float]:
        """Return the seconds of the named cases, as far as they are known."""
        known = self._read_all()
        found = {name: known.get(self._make_key(name)) for name in names}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def keep(self, cases: Iterable[CaseResult]) -> None:
        """Store the durations of the cases that reached a verdict."""
        new = {self._make_key(case.name): round(case.seconds, 2) for case in cases if case.checks}
        if not new:
            return
        known = {key: seconds for key, seconds in self._read_all().items() if key not in new} | new
        kept = dict(list(known.items())[-_MOST:])
        with suppress(OSError):
            write_atomically(self.path, json.dumps(kept, indent=0) + "\n")

    def _make_key(self, name: str) -> str:
        return f"{self.device} {name}"

    def _read_all(self) -> dict[str, float]:
        try:
            return _CONTENT.validate_json(self.path.read_bytes())
        except (OSError, ValidationError):
            return {}
