"""Judgements of cases by content, kept beside the full goldens. Does not import torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from moeverify.checksum import seal
from moeverify.errors import FormatError
from moeverify.json_file import JsonFile
from moeverify.report.brief import list_lines
from moeverify.report.failed_ranks import find_reason
from moeverify.report.files import write_atomically
from moeverify.report.words.cause import describe_cause
from moeverify.results.bisection import CommitJudgement
from moeverify.results.run import CaseResult
from moeverify.verification.controller.kept import code_version
from moeverify.verification.controller.machine import choose_device, default_cache, describe_environment

_FILE = "judgements.json"
_MOST = 5000  # judgements to remember, the most recent ones
_CONTENT = TypeAdapter(dict[str, CommitJudgement])
_FINAL = ("pass", "mismatch")
_DECIDES = ("moeverify", "torch", "python", "device")


def judge(result: CaseResult) -> CommitJudgement:
    """Return the judgement of a case result."""
    lead = result.lead
    if lead is None:
        return CommitJudgement(verdict=result.verdict, reason=find_reason(result), seconds=result.seconds)
    return CommitJudgement(
        verdict=result.verdict,
        check=lead.check,
        tensor=lead.tensor,
        code=lead.code,
        cause=describe_cause(lead),
        line=next(iter(list_lines(lead.culprit)), ""),
        is_proved=lead.culprit is not None and lead.culprit.names_cause,
        seconds=result.seconds,
    )


@dataclass(frozen=True)
class JudgementCache:
    """The file of judgements by a hash of all that decides them.

    It only saves time: an unreadable file counts as empty, and write errors are ignored.
    """

    path: Path

    @classmethod
    def of(cls, folder: Path | None) -> JudgementCache:
        """Return the judgements in a folder for full goldens, or in the default one."""
        return cls((folder or default_cache()) / _FILE)

    def make_key(self, content: Iterable[object]) -> str:
        """Return the key of a judgement with this content, which changes with moeverify and torch, too."""
        text = json.dumps([_describe_code(), list(content)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def read(self, key: str) -> CommitJudgement | None:
        """Return the judgement of a key, or None."""
        return self._read_all().get(key)

    def keep(self, found: dict[str, CommitJudgement]) -> None:
        """Store the final ones of these judgements: an error may have been one of the machine."""
        new = {key: each for key, each in found.items() if each.verdict in _FINAL}
        if not new:
            return
        known = {key: each for key, each in self._read_all().items() if key not in new} | new
        with suppress(OSError):
            write_atomically(self.path, seal(_CONTENT.dump_json(dict(list(known.items())[-_MOST:])).decode()))

    def _read_all(self) -> dict[str, CommitJudgement]:
        try:
            file = JsonFile.read(self.path, "")
            file.require_seal()
            return _CONTENT.validate_python(file.content)
        except (FormatError, ValidationError):
            return {}


@cache
def _describe_code() -> list[str]:
    """Return the versions and the code of this program that decide verdicts."""
    environment = describe_environment(choose_device("auto"))
    return [code_version(), *(environment[name] for name in _DECIDES)]
