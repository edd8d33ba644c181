"""Runs the cases of a pytest session in one launch, once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from moeverify.cases.schema import Case
from moeverify.errors import MoeverifyError
from moeverify.results.golden import GoldenRow
from moeverify.results.run import CaseResult, Event
from moeverify.verification.controller.escalation import escalate_stream
from moeverify.verification.controller.golden import record_goldens
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import stream_cases


class CaseRunner:
    """Provider of the verdict of each case.

    A single process streams the verdicts from the launch as tests request them. With several workers,
    `shared` is a folder that all of them can access. The first worker that needs a verdict then runs all
    cases while the others wait. The machine thus never runs the ranks of two cases at once. If `update` is
    set, `rows` contains the status of the goldens. If `escalates` is set, results that need runs in wider
    precisions come last, with the same content as in `moeverify run`.
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
        """Return the verdict of a case; the first call starts the launch that runs all wanted cases.

        Raises: MoeverifyError, for every case, if nothing can be run.
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
        """Stop all ranks."""
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
        """Yield the results of the first worker, which may be this one.

        Raises: MoeverifyError with the message of the error that ended the first worker's run.
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
    """Hold the lock of a file; the kernel releases it when this process ends in any way."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ignore(event: Event) -> None:
    """Ignore an event: pytest reports progress by its tests."""
