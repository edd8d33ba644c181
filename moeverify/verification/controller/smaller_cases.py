"""Smaller cases of a mismatching case: validated by their fields, run together, and written as a file.

Does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import load_cases
from moeverify.errors import CaseError, MachineError, Problem
from moeverify.results.bisection import CommitJudgement
from moeverify.results.run import CaseResult, Event
from moeverify.verification.controller.finished import read_own_sources
from moeverify.verification.controller.init_files import dump_yaml
from moeverify.verification.controller.judgement import JudgementCache, judge
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.reductions import (
    Reducible,
    Values,
    format_values,
    list_reducible,
    name_values,
)
from moeverify.verification.controller.run import OnEvent, run_cases
from moeverify.verification.controller.search_path import examine_functions, search_path

_NAMES: Any = {"name": True, "file": True, "description": True, "recipe": {"name": True}}
_REDUNDANT: Any = {**_NAMES, "recipe": {"name": True, "model": {"preset"}}}
# Time limit of the search for the first wrong line of one case; the first place is found before it is proved.
_LINE_SECONDS = 10.0

_MOST_SHOWN = 3  # fields in the name of a case of the progress view


@dataclass
class SmallerCases:
    """The cases of one file with other values, and whether they show the finding of the case itself.

    `paths`, `overrides` and `pattern` select that case. `first` is its judgement. Only a case that the search goes
    on with is explained, since the search for the first wrong operation takes longer than the case. `shown` has
    the cases that show the finding, as soon as they end: a signal may end the search before it goes on with one.
    """

    case: Case
    paths: Sequence[Path]
    overrides: Sequence[str]
    pattern: str | None
    options: RunOptions
    on_event: OnEvent
    cache: JudgementCache
    first: CommitJudgement | None = None
    shown: dict[str, tuple[Values, CommitJudgement]] = field(default_factory=dict)
    _num_ended: int = 0
    _loaded: dict[str, Case | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Verify the case itself. Raises: CaseError unless it has a mismatch."""
        self.first = self._judge([{}], self._explaining())[0]
        if self.first.verdict != "mismatch":
            verdict = "passes" if self.first.verdict == "pass" else f"has the verdict {self.first.verdict}"
            reason = f": {self.first.reason}" if self.first.reason else ""
            remedy = "name a case that has a mismatch, with the options under which it has one"
            problem = Problem(f"{self.case.name} {verdict}{reason}", self.case.file, remedy=remedy)
            raise CaseError([problem])
        self._note({}, self.first)

    def find_smallest(self) -> tuple[Values, CommitJudgement]:
        """Return the case that shows the finding and has the fewest smaller values left, with its judgement."""
        return min(self.shown.values(), key=lambda shown: self._count_left(shown[0]))

    def load(self, values: Values) -> Case | None:
        """Return the valid case with some values, or None."""
        texts = format_values(values)
        key = " ".join(texts)
        if key not in self._loaded:
            try:
                found = load_cases(self.paths, overrides=[*self.overrides, *texts], pattern=self.pattern)
            except CaseError:
                found = []
            self._loaded[key] = found[0] if len(found) == 1 else None
        return self._loaded[key]

    def list_fields(self, values: Values) -> Sequence[Reducible] | None:
        """Return the reducible fields of the case with some values, or None if it is invalid."""
        case = self.load(values)
        return None if case is None else list_reducible(case, search_path(self.case))

    def shows(self, candidates: Sequence[Values]) -> list[bool]:
        """Return whether each case shows a finding of the same check with the same code of its cause."""
        plain = replace(self.options, explain_seconds=0.0)
        return [self._is_same(each) for each in self._judge(candidates, plain)]

    def confirms(self, values: Values) -> bool:
        """Return whether the first wrong line of a case is that of the case itself, if that one is proved.

        Other first lines change with the sizes: they are the first of the places where the mistake may be.
        """
        assert self.first is not None
        if not self.first.is_proved:
            return True
        is_same = self._judge([values], self._explaining())[0].line == self.first.line
        if not is_same:
            self.shown.pop(name_values(values), None)
        return is_same

    def _explaining(self) -> RunOptions:
        return replace(self.options, explain_seconds=min(self.options.explain_seconds, _LINE_SECONDS))

    def _is_same(self, found: CommitJudgement) -> bool:
        assert self.first is not None
        is_mismatch = found.verdict == "mismatch" and found.check == self.first.check
        return is_mismatch and (not self.first.code or found.code == self.first.code)

    def _count_left(self, values: Values) -> int:
        return sum(len(each.smaller) for each in self.list_fields(values) or ())

    def _note(self, values: Values, found: CommitJudgement) -> None:
        """Keep a case that shows the finding."""
        if self.first is not None and self._is_same(found):
            self.shown[name_values(values)] = values, found

    def _judge(self, candidates: Sequence[Values], options: RunOptions) -> list[CommitJudgement]:
        """Return the judgement of each case; one launch runs all that are not known."""
        cases = [self._name(position, values) for position, values in enumerate(candidates)]
        keys = {case.name: self._make_key(case, options) for case in cases}
        known = {name: found for name, key in keys.items() if (found := self.cache.read(key)) is not None}
        values_of = dict(zip(keys, candidates, strict=True))
        for name, found in known.items():
            self._note(values_of[name], found)
        left = [case for case in cases if case.name not in known]
        if left:
            result = run_cases(left, options, lambda event: self._show(event, values_of))
            if result is None:
                raise MachineError("`moeverify shrink` starts its own ranks; run it without torchrun or srun")
            fresh = {each.name: judge(each) for each in result.cases}
            self.cache.keep({keys[name]: found for name, found in fresh.items()})
            known |= fresh
        return [known[case.name] for case in cases]

    def _name(self, position: int, values: Values) -> Case:
        case = self.load(values)
        assert case is not None  # the search tries only valid cases
        name = f"{self.case.name}-{position}"
        return case.model_copy(update={"name": name, "recipe": case.recipe.model_copy(update={"name": name})})

    def _make_key(self, case: Case, options: RunOptions) -> str:
        content = case.model_dump(mode="json", exclude=_NAMES)
        digest = hashlib.sha256()
        for source in read_own_sources(case, self.options.fault):
            digest.update(source)
        settings = [options.fault, options.backend, options.device, options.explain_seconds]
        return self.cache.make_key(["shrink", content, settings, digest.hexdigest()])

    def _show(self, event: Event, values_of: Mapping[str, Values]) -> None:
        """Pass an event on, with the changed fields as the name of the case."""
        values = values_of.get(event.case)
        label = event.case if values is None else _label(values)
        self._num_ended += event.kind == "case-end"
        # A round has a known number of cases, the search has none.
        changes: dict[str, Any] = {"case": label, "recipes": (), "num_done": self._num_ended, "num_total": 0}
        if event.result is not None:
            found = judge(event.result)
            if values is not None:
                self._note(values, found)
            reason = found.summary
            if self.first is not None and not self._is_same(found) and found.verdict == "mismatch":
                reason += ", another finding"
            changes["result"] = CaseResult(
                name=label,
                file="",
                verdict=found.verdict,
                reason=reason,
                ranks=event.result.ranks,
                seconds=event.result.seconds,
            )
        if event.kind not in ("golden", "golden-end", "up", "lost", "work"):
            self.on_event(event.model_copy(update=changes))


def _label(values: Values) -> str:
    texts = [f"{path.partition('.')[2]}={value}" for path, value in values.items()]
    more = f" and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    # The last ones are those that this round changes.
    return ", ".join(texts[-_MOST_SHOWN:]) + more or "the case itself"


def examine_place(case: Case, out: Path) -> None:
    """Check that a case file at another place finds the functions of the case.

    Raises: CaseError if it does not.
    """
    remedy = f"write it beside {case.file}, from where Python finds its functions"
    for problem in examine_functions(case.model_copy(update={"file": str(out)})):
        raise CaseError([replace(problem, remedy=remedy)])


def write_case(case: Case, name: str, comments: Sequence[str]) -> str:
    """Return the text of a case file with all fields that differ from their defaults, below comments."""
    content = case.model_dump(mode="json", exclude=_REDUNDANT, exclude_defaults=True)
    lines = "".join(f"# {comment}\n" for comment in comments)
    return lines + dump_yaml({"name": name, **content})
