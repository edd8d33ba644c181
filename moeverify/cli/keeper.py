"""Storage for the results of finished cases during a run, so that an early end loses none."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from moeverify.results.run import CaseResult, Event, RunResult

if TYPE_CHECKING:
    from moeverify.cases.schema import Case


class Keeper:
    """An observer of a run's events; `results` maps finished cases to their results."""

    def __init__(self, finished: Mapping[str, CaseResult] | None = None) -> None:
        self.results: dict[str, CaseResult] = dict(finished or {})
        self._running = ""
        self._launches = 0
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()

    def watch(self, show: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return a callback that records an event and passes it on to `show`."""
        from moeverify.verification.controller.run import pass_results

        def note(event: Event) -> None:
            if event.kind == "case-start":
                self._running = event.case
            elif event.kind == "launch":
                self._launches += 1
            show(event)

        return pass_results(self._take, note)

    def _take(self, result: CaseResult) -> None:
        self.results[result.name] = result

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
        return RunResult(
            verdict="error",
            environment={"python": platform.python_version(), "platform": platform.platform()},
            started=self._started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - self._clock,
            launches=self._launches,
            cases=tuple(results),
        )
