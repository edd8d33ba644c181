"""Verdicts of finished cases, stored in a file, so that an interrupted run can resume.

Each verdict is one line, written when its case ends. A killed run therefore keeps all finished cases. Under
an external launcher only rank 0 accesses the file; the other nodes need not see it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path

from moeverify.cases.function import list_top_modules
from moeverify.cases.schema import Case
from moeverify.input_file import read_input, read_sources
from moeverify.results.record import Record
from moeverify.results.run import CaseResult, RunResult
from moeverify.verification.controller.escalation import needs_escalation
from moeverify.verification.controller.kept import KeptRows
from moeverify.verification.controller.machine import choose_device, describe_environment
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import OnEvent, find_overall_verdict, pass_results
from moeverify.verification.controller.search_path import search_path
from moeverify.verification.launch.world import external_world

# A requeued job may run on other nodes of the same kind: kernel and core count do not affect a verdict.
_DECIDES = ("moeverify", "torch", "python", "device")
_FINAL = ("pass", "mismatch")


class FinishedCase(Record):
    """A stored verdict. `name` is the case name with a hash of the case and its fault."""

    name: str
    result: CaseResult


@dataclass(frozen=True)
class FinishedCases:
    """Results of finished cases by name, and the file that stores further ones, if any.

    `failures` lists the verdicts that could not be written. The run continues without them.
    """

    results: Mapping[str, CaseResult]
    keys: Mapping[str, str]
    kept: KeptRows[FinishedCase] | None = None
    failures: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, cases: Sequence[Case], options: RunOptions) -> FinishedCases:
        """Return the stored results of these cases, and create the file if it is missing.

        Without a path there are no results. Collective: all ranks of an external launcher.

        Raises: CaseError when the file was written by other code or for another device, or is not writable;
        FormatError when it is not a file of kept verdicts.
        """
        keys = {case.name: make_key(case, options) for case in cases}
        if path is None:
            return cls({}, keys)
        world = external_world()
        if world is None:
            kept = _open_file(path, options)
            return cls(_find(kept, keys), keys, kept)
        from moeverify.verification.launch.external import share_from_first

        found, own = {}, None
        problem: Exception | None = None
        if world.rank == 0:
            try:
                own = _open_file(path, options)
                found = _find(own, keys)
            except Exception as error:  # the other ranks wait for a message
                problem = error
        names = json.loads(share_from_first(json.dumps(None if problem else sorted(found))))
        if problem is not None:
            raise problem
        if names is None:
            raise SystemExit(2)  # rank 0 prints the reason
        results = {
            case.name: found.get(case.name) or _stand_for(case) for case in cases if case.name in names
        }
        return cls(results, keys, own)

    def knowing(self, results: Mapping[str, CaseResult]) -> FinishedCases:
        """Return a copy with additional results, which are not run again and not written to the file."""
        return replace(self, results={**self.results, **results})

    def list_left(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases that are not finished."""
        return [case for case in cases if case.name not in self.results]

    def keeping(
        self, on_event: OnEvent, unconfirmed: Collection[str] = (), escalated: Collection[str] = ()
    ) -> OnEvent:
        """Return an event handler that stores every final verdict and passes each event on.

        The pass of a case in `unconfirmed` is not final, and neither is an uncertain finding of a case in
        `escalated`. Both are sets of case names. `keep_rest` stores their final results.
        """

        def keep(result: CaseResult) -> None:
            is_unconfirmed = result.verdict == "pass" and result.name in unconfirmed
            if not is_unconfirmed and not (result.name in escalated and needs_escalation(result)):
                self._keep(result)

        return pass_results(keep, on_event)

    def keep_rest(self, results: Sequence[CaseResult]) -> None:
        """Store the verdicts that are not in the file yet."""
        for result in results:
            if self.kept is not None and self.keys[result.name] not in self.kept.rows:
                self._keep(result)

    def _keep(self, result: CaseResult) -> None:
        if self.kept is None or result.verdict not in _FINAL:
            return
        if self.failures:  # a truncated line makes later lines unreadable, so it must stay the last one
            self.failures.append(f"{self.kept.path} lacks the verdict of {result.name}")
            return
        try:
            self.kept.add(FinishedCase(name=self.keys[result.name], result=result))
        except OSError as error:
            reason = error.strerror or str(error)
            self.failures.append(f"{self.kept.path} lacks the verdict of {result.name}: {reason}")

    def complete(self, run: RunResult | None, cases: Sequence[Case]) -> RunResult | None:
        """Return the run with the finished cases in their places, or None for None."""
        if run is None or not self.results:
            return run
        known = {**self.results, **{result.name: result for result in run.cases}}
        results = tuple(known[case.name] for case in cases)
        return run.model_copy(update={"cases": results, "verdict": find_overall_verdict(results)})


def _open_file(path: Path, options: RunOptions) -> KeptRows[FinishedCase]:
    from moeverify.report.files import check_writable

    check_writable([path])
    environment = describe_environment(choose_device(options.device))
    return KeptRows(path, {name: environment[name] for name in _DECIDES}, FinishedCase)


def _find(kept: KeptRows[FinishedCase], keys: Mapping[str, str]) -> dict[str, CaseResult]:
    return {name: kept.rows[key].result for name, key in keys.items() if key in kept.rows}


def make_key(case: Case, options: RunOptions) -> str:
    """Return the case name with a hash of all that affects the verdict: fields, fault and user code."""
    fault = options.case_faults.get(case.name, options.fault)
    content = [case.model_dump(mode="json", exclude={"file"}), fault, options.backend]
    content += ["sketch"] if options.sketch == "always" else []
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for source in read_own_sources(case, fault):
        digest.update(source)
    return f"{case.name} {digest.hexdigest()[:16]}"


def read_own_sources(case: Case, fault: str | None) -> Iterator[bytes]:
    """Yield the sources of the user that affect a verdict.

    These are the files in the folder of the case, and the modules or packages that contain its functions.
    """
    if fault is None and not has_own_code(case):
        return
    folders = search_path(case)
    places = {Path(folders[0])}
    for name in list_top_modules([*case.recipe.functions.values(), case.layout.parallelize, fault]):
        spec = PathFinder.find_spec(name, folders)
        if spec is not None and spec.origin is not None:
            places.add(Path((spec.submodule_search_locations or [spec.origin])[0]))
    for place in sorted(each for each in places if not places & set(each.parents)):
        if place.is_file():
            yield read_input(place)
        else:
            yield from (source for _, source in read_sources(place))


def has_own_code(case: Case) -> bool:
    """Return whether a case refers to functions of the user."""
    return case.layout.parallelize is not None or bool(case.recipe.functions)


def _stand_for(case: Case) -> CaseResult:
    """Return a placeholder for a result that only rank 0 has. It is never shown."""
    return CaseResult(
        name=case.name, file=case.file, verdict="skipped", ranks=case.layout.world_size, seconds=0.0
    )
