"""Runs the cases of a pytest session in one launch, and once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from moeverify.case.schema import Case
from moeverify.controller.escalation import escalate_stream
from moeverify.controller.golden import record_goldens
from moeverify.controller.options import RunOptions
from moeverify.controller.run import stream_cases
from moeverify.errors import MoeverifyError
from moeverify.results.golden import GoldenRow
from moeverify.results.run import CaseResult, Event


class CaseRunner:
    """Gives the verdict of each case.

    Alone, it reads the verdicts from the launch as the tests ask for them. As one of several workers
    (`shared` is a folder that all of them have) the first that asks runs everything while the others wait,
    whichever tests each of them was given: the machine never has the ranks of two cases at once. `rows` says
    what became of the goldens where `update` is set. With `escalates`, results of which wider precisions are asked
    come last, as `moeverify run` would have them.
    """

    def __init__(self, options: RunOptions, *, update: bool, escalates: bool, shared: Path | None) -> None:
        self.rows: list[GoldenRow] = []
        self._options = options
        self._update = update
        self._escalates = escalates
        self._shared = shared
        self._results: dict[str, CaseResult] = {}
        self._stream: Generator[CaseResult] | None = None
        self._error: MoeverifyError | None = None

    def result(self, case: Case, wanted: Sequence[Case]) -> CaseResult:
        """Return the verdict of a case; the first call starts the launch that runs all that are wanted.

        Raises: MoeverifyError where nothing can be run at all, for every case.
        """
        if self._stream is None and self._error is None:
            self._stream = (
                self._run(wanted) if self._shared is None else self._run_shared(wanted, self._shared)
            )
        try:
            while case.name not in self._results and self._error is None and self._stream is not None:
                found = next(self._stream)
                self._results[found.name] = found
        except MoeverifyError as error:
            self._error = error
        if case.name not in self._results:
            assert self._error is not None
            raise self._error
        return self._results[case.name]

    def close(self) -> None:
        """End all ranks."""
        if self._stream is not None:
            self._stream.close()

    def _run(self, wanted: Sequence[Case]) -> Generator[CaseResult]:
        if self._update:
            self.rows = record_goldens(wanted, self._options, _ignore)
        results = stream_cases(wanted, self._options, _ignore)
        if self._escalates:
            results = escalate_stream(results, wanted, self._options, _ignore)
        with closing(results):
            yield from results

    def _run_shared(self, wanted: Sequence[Case], folder: Path) -> Generator[CaseResult]:
        """Yield what the first worker found out, which may be this one.

        Raises: MoeverifyError with the text of what ended the run of the first worker.
        """
        path = folder / "cases.json"
        with _locked(folder / "lock"):
            if not path.exists():
                content = self._run_all(wanted)
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(content))
                partial.replace(path)
        content = json.loads(path.read_text())
        yield from map(CaseResult.model_validate, content["results"])
        raise MoeverifyError(content["error"] or "the worker that ran the cases did not select this one")

    def _run_all(self, wanted: Sequence[Case]) -> dict[str, Any]:
        results: list[CaseResult] = []
        error = ""
        try:
            results.extend(self._run(wanted))
        except MoeverifyError as raised:
            error = str(raised)
        return {"results": [result.model_dump(mode="json") for result in results], "error": error}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; the kernel lets go of it when this process ends, however it does."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ignore(event: Event) -> None:
    """Take an event: pytest shows how far it is by its tests."""
