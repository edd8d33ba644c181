"""The folder in which ranks put records for the judge: small files, each written once. No torch.

Ranks never wait for each other or for the judge, and issue no collective: a guard must not change a
script's behavior.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from moeverify.scripts.guard.lines import RankHeader, StepRecord

_MOST_LEFT = 8  # records that nobody took; the judge is then gone
FINDINGS = "findings.jsonl"


class RankOutbox:
    """The folder as one rank writes to it."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._left: deque[Path] = deque()

    def put_header(self, header: RankHeader) -> None:
        """Write the description of this rank.

        Raises: OSError when writing fails.
        """
        _write(self._folder / f"rank{self._rank}.header.json", header.model_dump_json())

    def put(self, record: StepRecord) -> None:
        """Write the record of a step.

        Raises: OSError when writing fails.
        """
        path = self._folder / f"rank{self._rank}.step{record.step:08}.json"
        _write(path, record.model_dump_json())
        self._left.append(path)
        if len(self._left) > _MOST_LEFT:
            self._left.popleft().unlink(missing_ok=True)

    def has_findings(self) -> bool:
        """Return whether the judge has any findings."""
        return (self._folder / FINDINGS).exists()


class Inbox:
    """The folder as the judge reads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.headers: dict[int, RankHeader] = {}

    @property
    def world_size(self) -> int:
        """Return the number of ranks, or 0 before the first rank has described itself."""
        return next((header.world_size for header in self.headers.values()), 0)

    def take(self, *, is_over: bool) -> list[dict[int, StepRecord]]:
        """Return the records of the steps that all ranks have recorded, by rank, in the order of the steps.

        When the script is over, incomplete steps are included. Returned records are removed from the
        folder.
        """
        for path in sorted(self._folder.glob("rank*.header.json")):
            header = RankHeader.model_validate_json(path.read_text())
            self.headers[header.rank] = header
        by_step: dict[str, list[Path]] = {}
        for path in self._folder.glob("rank*.step*.json"):
            by_step.setdefault(path.name.split(".")[1], []).append(path)
        taken: list[dict[int, StepRecord]] = []
        complete = [step for step, paths in by_step.items() if len(paths) == self.world_size]
        # Ranks write records in step order: a step before a complete one will not get further records.
        last = max(complete, default="")
        for step, paths in sorted(by_step.items()):
            if step <= last or is_over:
                records = [_read(path) for path in paths]
                found = {record.rank: record for record in records if record is not None}
                taken.append(dict(sorted(found.items())))
                for path in paths:
                    path.unlink(missing_ok=True)
        return taken

    def remove(self) -> None:
        """Remove all files of the ranks."""
        for path in self._folder.glob("rank*.json*"):
            path.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    # Write under a name that the judge ignores, and rename the complete file.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _read(path: Path) -> StepRecord | None:
    try:
        return StepRecord.model_validate_json(path.read_text())
    except OSError:
        return None  # a rank that is ahead has removed its record
