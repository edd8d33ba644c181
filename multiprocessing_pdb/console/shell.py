"""The console's prompt: reads a line, selects its ranks, and calls the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from multiprocessing_pdb.console import commands
from multiprocessing_pdb.console.attach import Attachment
from multiprocessing_pdb.console.comparison import compare
from multiprocessing_pdb.console.golden import compare_with_golden
from multiprocessing_pdb.console.grouping import name_ranks, show_groups
from multiprocessing_pdb.console.help_text import HELP
from multiprocessing_pdb.console.recording import PROMPT, Recording, RecordingError, read_commands
from multiprocessing_pdb.console.registry import JobError, RankRegistry
from multiprocessing_pdb.console.selection import SelectionError, select
from multiprocessing_pdb.console.target import Target, read_text
from multiprocessing_pdb.console.terminal import Terminal


class UsageError(ValueError):
    """A command without its required arguments."""


class Shell:
    """One console session."""

    def __init__(self, registry: RankRegistry, terminal: Terminal, deadline: float) -> None:
        self._registry = registry
        self._terminal = terminal
        self._deadline = deadline
        self._is_over = False
        self._on_ranks: dict[str, Callable[[Sequence[Target], str], str | None]] = {
            "ls": lambda targets, _: commands.list_ranks(self._registry, targets, self._find_armed(targets)),
            "diff": self._diff,
            "where": lambda targets, _: commands.show_stacks(targets, self._deadline),
            "interrupt": lambda targets, _: commands.interrupt(targets),
            "attach": self._attach_to,
            "kill": lambda targets, _: commands.kill(targets),
        }
        self._on_running: dict[str, Callable[[Sequence[Target], str], str]] = {
            "stop": self._stop,
            "break": self._break,
        }
        self._on_console: dict[str, Callable[[str], str | None]] = {
            "wait": self._wait,
            "arm": lambda rest: commands.arm(self._registry, rest),
            "stacks": lambda _: commands.dump_stacks(self._registry),
            "jobs": lambda _: self._list_jobs(),
            "job": self._choose_job,
            "deadline": self._set_deadline,
            "record": self._record,
            "replay": self._replay,
            "help": lambda _: HELP,
            "h": lambda _: HELP,
            "?": lambda _: HELP,
            "q": lambda _: self._ask_quit_here(),
            "quit": lambda _: self._quit(),
            "exit": lambda _: self._quit(),
            "detach": lambda _: "not attached; quit leaves the console, and ranks stay stopped",
        }

    def run(self) -> None:
        """Read and run commands until the user quits or the input ends."""
        while not self._is_over:
            try:
                self._show_late_answers()
                self._show_deaths()
                line = self._terminal.read(PROMPT, self._complete)
            except EOFError:
                self.do("quit")
                return
            except KeyboardInterrupt:
                self._terminal.show("")
                continue
            self.do(line)

    def do(self, line: str) -> bool:
        """Run one command and show its output; return whether it succeeded."""
        self._terminal.record(line.strip())
        try:
            self._show_deaths()
            text = self._dispatch(line.strip())
        except (SelectionError, JobError, UsageError, RecordingError, commands.CommandError) as error:
            self._terminal.show(f"*** {error}")
            return False
        except KeyboardInterrupt:
            self._terminal.show("\nnot waited for any longer; late answers are shown when they come")
            return False
        if text:
            self._terminal.show(text)
        return True

    def _dispatch(self, line: str) -> str | None:
        if not line or line.startswith("#"):
            return None
        selection = None
        if line.startswith("@"):
            selection, _, line = line[1:].partition(" ")
            line = line.strip() or "ls"
        word, _, rest = line.partition(" ")
        if selection is None and word in self._on_console:
            return self._on_console[word](rest.strip())
        if word in self._on_running:
            return self._on_running[word](self._choose_any(selection), rest.strip())
        if word in ("kill", "attach") and selection is None:
            if not rest.strip():
                raise UsageError(f"{word} needs a rank, such as: {word} 3")
            selection = rest.strip().removeprefix("@")
        if selection is None and word not in self._on_ranks and word not in commands.STEPS:
            raise UsageError(f"no command {word!r}; try help, or @all {line}, or attach to a rank")
        targets = self._choose(selection)
        if not targets and not (word == "ls" and selection is None and self._registry.find_armed()):
            raise UsageError("no rank is stopped; wait 1 waits for one")
        if word in self._on_ranks:
            return self._on_ranks[word](targets, rest.strip())
        if word in commands.STEPS:
            step = f"{commands.STEPS[word]} {rest}".strip()
            return commands.run_line(targets, step, self._deadline, command=True)
        return commands.run_line(targets, line, self._deadline)

    def _choose(self, selection: str | None) -> list[Target]:
        targets = self._registry.find()
        return targets if selection is None or not targets else select(selection, targets)

    def _find_armed(self, targets: Sequence[Target]) -> list[Target]:
        """Return the armed ranks for `ls`: all without a selection, none with one."""
        return self._registry.find_armed() if len(targets) == len(self._registry.find()) else []

    def _choose_any(self, selection: str | None) -> list[Target]:
        """Return the selected ranks among the stopped and the armed ones."""
        targets = [*self._registry.find(), *self._registry.find_armed()]
        if not targets:
            raise UsageError(
                "no rank is stopped, and none is armed: arm() lets the console stop ranks that run"
            )
        return targets if selection is None else select(selection, targets)

    def _stop(self, targets: Sequence[Target], rest: str) -> str:
        chosen = select(rest.removeprefix("@"), targets) if rest else targets
        return commands.stop(chosen)

    def _break(self, targets: Sequence[Target], rest: str) -> str:
        return commands.set_breakpoint(targets, rest, self._deadline)

    def _diff(self, targets: Sequence[Target], expression: str) -> str:
        if not expression:
            raise UsageError("diff needs an expression, such as: diff loss")
        is_selected = len(targets) < len(self._registry.find())
        running = None if is_selected else self._registry.find_armed(targets[0].job)
        flag, _, rest = expression.partition(" ")
        if flag == "--golden":  # not a Python expression, unless golden is a variable
            return compare_with_golden(targets, rest.strip(), self._deadline, running)
        return compare(targets, expression, self._deadline, running)

    def _attach_to(self, targets: Sequence[Target], _: str) -> None:
        if len(targets) != 1:
            raise UsageError(f"attach takes one rank, not {name_ranks(targets)}")
        Attachment(self._terminal, targets[0], self._find_next_stop, self._ask_quit).run()

    def _find_next_stop(self, gone: Target) -> Target | None:
        """Return the target of the same rank at another stop. A replay must wait for that stop too."""
        again = self._registry.find_next_stop(gone)
        if again is not None:
            self._terminal.record(f"wait {len(self._registry.find())}")
        return again

    def _ask_quit_here(self) -> None:
        if self._ask_quit():
            self._quit()

    def _ask_quit(self) -> bool:
        """Ask how to interpret `q`, do it, and return whether to leave the current prompt."""
        stopped = self._registry.find()
        self._terminal.show(
            f"q: choose  d: leave, ranks stay stopped  c: continue all of the {len(stopped)} stopped"
            " ranks  k: kill the job  anything else: nothing"
        )
        try:
            answer = self._terminal.read("d, c or k? ", lambda text, line, begin, end: []).strip()
        except (EOFError, KeyboardInterrupt):
            return False
        if answer == "c":
            self._terminal.show(commands.run_line(stopped, "continue", self._deadline, command=True))
        elif answer == "k":
            self._terminal.show(commands.kill_job(self._registry))
        return answer in ("d", "c", "k")

    def _quit(self) -> str:
        self._is_over = True
        stopped = self._registry.refresh()
        return f"{name_ranks(stopped)}: still stopped" if stopped else "no rank is stopped"

    def _wait(self, rest: str) -> str:
        words = rest.split()
        if not words or not words[0].isdecimal():
            raise UsageError("wait needs a number of ranks, and may have seconds: wait 8 60")
        seconds = _read_seconds(words[1]) if len(words) > 1 else 365 * 86400.0
        found = self._registry.await_count(int(words[0]), seconds)
        text = f"{len(found)} stopped: {name_ranks(found)}" if found else "no rank is stopped"
        if len(found) < int(words[0]):
            raise UsageError(f"{text} after {seconds:g} s")
        return text

    def _list_jobs(self) -> str:
        jobs = self._registry.find_jobs()
        return "\n".join(f"{job}: {count} stopped" for job, count in jobs.items()) or "no rank is stopped"

    def _choose_job(self, rest: str) -> str:
        self._registry.job = rest or None
        return f"job {rest}" if rest else "any job"

    def _set_deadline(self, rest: str) -> str:
        if rest:
            self._deadline = _read_seconds(rest)
        return f"each rank has {self._deadline:g} s to answer"

    def close(self) -> None:
        """End the recording."""
        if self._terminal.recording is not None:
            self._terminal.recording.close()
            self._terminal.recording = None

    def _record(self, rest: str) -> str:
        running = self._terminal.recording
        if rest:
            recording = Recording(Path(rest).expanduser(), self._registry.job or "(any)")
        elif running is not None:
            self.close()
            return f"recorded in {running.path}; replay {running.path} does the same again"
        else:
            raise UsageError("nothing is recorded; record needs a file: record session.md")
        self.close()
        self._terminal.recording = recording
        return f"recording in {rest}, until record without a file, or quit"

    def _replay(self, rest: str) -> str:
        if not rest:
            raise UsageError("replay needs a file that record has written: replay session.md")
        lines = read_commands(Path(rest).expanduser())
        for number, line in enumerate(lines, 1):
            self._terminal.echo(f"{PROMPT}{line}")
            if not self.do(line):
                raise UsageError(f"replay ends at command {number} of {len(lines)}: {line}")
        return f"replayed {len(lines)} command(s) of {rest}"

    def _show_deaths(self) -> None:
        for line in self._registry.take_deaths():
            self._terminal.show(f"*** {line}")

    def _show_late_answers(self) -> None:
        for target in self._registry.refresh():
            target.sort()
            while target.late:
                what, frame = target.late.popleft()
                if what != "status":
                    text = read_text(frame, "error") or read_text(frame, "out") or read_text(frame, "end")
                    self._terminal.show(f"late answer to {what!r}: {show_groups([(target, text)])}")
                target.learn(frame)

    def _complete(self, text: str, line: str, begin: int, end: int) -> list[str]:
        words = [*self._on_ranks, *self._on_running, *self._on_console, *commands.STEPS]
        return (
            sorted({f"{word} " for word in words if word.startswith(text) and len(word) > 1})
            if begin == 0
            else []
        )


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is no number of seconds") from None
    if not 0 < seconds < 1e9:
        raise UsageError(f"{text} s is no deadline")
    return seconds
