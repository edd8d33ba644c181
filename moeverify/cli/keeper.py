"""Storage for the results of finished cases during a run: an early end loses none, and other commands see them."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from moeverify.results.run import CaseResult, Event, RunResult

if TYPE_CHECKING:
    from moeverify.cases.schema import Case

_BETWEEN = 1.0  # least seconds between two writes of a run that goes on
_SHARE = 20  # and this many times the seconds that the last write took


class Keeper:
    """An observer of a run's events; `results` maps finished cases to their results."""

    def __init__(self, finished: Mapping[str, CaseResult] | None = None) -> None:
        self.results: dict[str, CaseResult] = dict(finished or {})
        self._running = ""
        self._launches = 0
        self._next_write = 0.0
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()

    def watch(
        self, show: Callable[[Event], None], cases: Sequence[Case] = (), file: Path | None = None
    ) -> Callable[[Event], None]:
        """Return a callback that records an event and passes it on to `show`.

        If `file` is given, the results so far are written there while the cases run.
        """
        from moeverify.verification.controller.run import pass_results

        def note(event: Event) -> None:
            if event.kind == "case-start":
                self._running = event.case
            elif event.kind == "launch":
                self._launches += 1
            show(event)
            if file is not None:
                self._write(cases, file)

        return pass_results(self._take, note)

    def _take(self, result: CaseResult) -> None:
        self.results[result.name] = result

    def _write(self, cases: Sequence[Case], file: Path) -> None:
        """Write the results so far, unless the last write was a moment ago."""
        from moeverify.report.formats import json

        started = time.monotonic()
        if started < self._next_write:
            return
        names = [case.name for case in cases if case.name not in self.results]
        run = self._make_run(tuple(self.results.values()), waiting=sorted(names, key=self._running.__ne__))
        with suppress(OSError):  # the whole run is written there at the end, which reports the failure
            json.write(run, file)
        took = time.monotonic() - started
        self._next_write = started + took + max(_BETWEEN, _SHARE * took)

    def _make_run(self, results: tuple[CaseResult, ...], waiting: Sequence[str] = ()) -> RunResult:
        return RunResult(
            verdict="error",
            environment={"python": platform.python_version(), "platform": platform.platform()},
            command=shlex.join(["moeverify", *sys.argv[1:]]),
            started=self._started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - self._clock,
            launches=self._launches,
            waiting=tuple(waiting),
            cases=results,
        )

    def make_partial(self, cases: Sequence[Case], error: BaseException) -> RunResult:
        """Return the partial run; unfinished cases are marked as skipped, with the reason."""
        from moeverify.cases.axes.describe import describe_layout

        interrupted = isinstance(error, KeyboardInterrupt)
        why = str(error) or "interrupted" if interrupted else f"the run ended early: {error}"
        results = [
            self.results.get(case.name)
            or CaseResult(
                name=case.name,
                file=case.file,
                verdict="skipped",
                reason=f"{why}{' while this case ran' if case.name == self._running else ''}",
                ranks=case.layout.world_size,
                seconds=0.0,
                recipe=case.recipe.name,
                layout=describe_layout(case.layout),
            )
            for case in cases
        ]
        names = {case.name for case in cases}
        results += [  # e.g. a save that several loads need
            result
            for name, result in self.results.items()
            if name not in names and result.verdict not in ("pass", "skipped")
        ]
        return self._make_run(tuple(results))
