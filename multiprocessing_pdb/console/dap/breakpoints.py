"""Breakpoints of an editor, set in each rank as soon as possible, and removed at the end."""

from __future__ import annotations

from collections.abc import Iterable

from multiprocessing_pdb.console.broadcast import ask
from multiprocessing_pdb.console.dap.threads import RankThread

Lines = dict[int, str]  # lines of a file, each with its condition or ""


class Breakpoints:
    """The breakpoints that the editor requested, and those set in each process."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._wanted: dict[str, Lines] = {}
        self._given: dict[tuple[int, float | None], dict[str, Lines]] = {}

    def replace(self, path: str, wanted: Lines, threads: Iterable[RankThread]) -> dict[int, str]:
        """Replace the breakpoints of a file. Return, by line, why a breakpoint is not set anywhere yet."""
        self._wanted[path] = wanted
        problems = dict.fromkeys(wanted, "set in a rank when it next stops")
        for thread in threads:
            for line, problem in self.give(thread).get(path, {}).items():
                if problem or line in problems:
                    problems[line] = problem
            if thread.is_stopped or thread.target.state == "armed":
                for line in self._given.get(thread.process, {}).get(path, {}):
                    problems.pop(line, None)
        return {line: problem for line, problem in problems.items() if problem}

    def give(self, thread: RankThread) -> dict[str, dict[int, str]]:
        """Synchronize the breakpoints of a rank, if possible now. Return problems by file and line."""
        problems: dict[str, dict[int, str]] = {}
        given = self._given.setdefault(thread.process, {})
        for path, wanted in self._wanted.items():
            has = given.setdefault(path, {})
            for line, condition in list(has.items()):
                if wanted.get(line) != condition and self._clear(thread, path, line):
                    del has[line]
            for line, condition in wanted.items():
                if line not in has:
                    problem = self._set(thread, path, line, condition)
                    problems.setdefault(path, {})[line] = problem
                    if not problem:
                        has[line] = condition
        return problems

    def clear(self, threads: Iterable[RankThread]) -> None:
        """Remove all breakpoints from the stopped ranks, which may outlive the editor."""
        self._wanted = {path: {} for path in self._wanted}
        for thread in threads:
            if thread.is_stopped:
                self.give(thread)

    def _set(self, thread: RankThread, path: str, line: int, condition: str) -> str:
        """Return the problem, or "" if there is none."""
        if thread.target.state == "armed":
            request = {"do": "break", "place": f"{path}:{line}", "condition": condition}
            (answer,) = ask([thread.target], request, self._deadline)
            return answer.failure
        return self._run(thread, f"break {path}:{line}" + (f", {condition}" if condition else ""))

    def _clear(self, thread: RankThread, path: str, line: int) -> bool:
        return not self._run(thread, f"clear {path}:{line}")

    def _run(self, thread: RankThread, text: str) -> str:
        if not thread.is_stopped:
            return "set in a rank when it next stops"
        request = {"do": "line", "text": text, "command": True, "nested": False}
        (answer,) = ask([thread.target], request, self._deadline)
        if answer.failure:
            return answer.failure
        return answer.out.strip() if answer.out.startswith("***") else ""
