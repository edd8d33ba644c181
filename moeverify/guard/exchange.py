"""The folder in which ranks leave records and the judge takes them: small files, each written once. No torch.

Ranks never wait for each other or for the judge, and issue no collective: a guard must not change what a script does.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from moeverify.guard.lines import RankHeader, StepRecord

_MOST_LEFT = 8  # records that nobody took: the judge is gone
FINDINGS = "findings.jsonl"


class RankOutbox:
    """Where one rank leaves its records."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._left: deque[Path] = deque()

    def put_header(self, header: RankHeader) -> None:
        """Leave the description of this rank.

        Raises: OSError when the disk refuses.
        """
        _write(self._folder / f"rank{self._rank}.header.json", header.model_dump_json())

    def put(self, record: StepRecord) -> None:
        """Leave the record of a step.

        Raises: OSError when the disk refuses.
        """
        path = self._folder / f"rank{self._rank}.step{record.step:08}.json"
        _write(path, record.model_dump_json())
        self._left.append(path)
        if len(self._left) > _MOST_LEFT:
            self._left.popleft().unlink(missing_ok=True)

    def has_findings(self) -> bool:
        """Return whether the judge has found anything."""
        return (self._folder / FINDINGS).exists()


class Inbox:
    """What the judge has found in the folder and not taken yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.headers: dict[int, RankHeader] = {}

    @property
    def world_size(self) -> int:
        """Return the number of ranks, 0 as long as none is there."""
        return next((header.world_size for header in self.headers.values()), 0)

    def take(self, *, is_over: bool) -> list[dict[int, StepRecord]]:
        """Return the records of steps that all ranks have left, by rank, in the order of the steps.

        When the script is over, those of the other steps too. What is returned is removed from the folder.
        """
        for path in sorted(self._folder.glob("rank*.header.json")):
            header = RankHeader.model_validate_json(path.read_text())
            self.headers[header.rank] = header
        by_step: dict[str, list[Path]] = {}
        for path in self._folder.glob("rank*.step*.json"):
            by_step.setdefault(path.name.split(".")[1], []).append(path)
        taken: list[dict[int, StepRecord]] = []
        complete = [step for step, paths in by_step.items() if len(paths) == self.world_size]
        # Ranks leave records in the order of the steps: what lacks a rank before a complete step stays so.
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
        """Remove what ranks have left."""
        for path in self._folder.glob("rank*.json*"):
            path.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    # A name that the judge does not look for until all of it is there.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _read(path: Path) -> StepRecord | None:
    try:
        return StepRecord.model_validate_json(path.read_text())
    except OSError:
        return None  # a rank that is ahead has removed it
