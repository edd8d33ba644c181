"""Random actions at the prompts: stopped threads stay reachable, and programs compute their usual results.

Each sequence has its own processes, forked from one that has all imports (`programs/mazes.py`), and talks
to them through their sockets. MPDB_TEST_SEQUENCES=5000 asks for that many new sequences for each prompt; by
default the same 150 run each time. Bugs that it found have separate regression tests, such as in
`test_mpdb_prompts.py`.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import maze

from multiprocessing_pdb.console.broadcast import Answer, ask, collect
from multiprocessing_pdb.console.link import LinkClosedError, wait
from multiprocessing_pdb.console.registry import RankRegistry
from multiprocessing_pdb.console.source import LocalSource

PROGRAMS = Path(__file__).resolve().parent / "programs"
SEQUENCES = int(os.environ.get("MPDB_TEST_SEQUENCES", "75"))  # for each of pdb and pdbpp
PATIENCE = float(
    os.environ.get("MPDB_TEST_PATIENCE", "300")
)  # a lost rank never returns, while a slow one does
PATIENCE_ONCE_LOST = 10.0  # while shrinking a sequence that has lost a rank
MOMENT = 0.002
SOURCE = Path(maze.__file__).read_text().splitlines()
LINES = [number for number, line in enumerate(SOURCE, 1) if "Tra(" in line or "total +=" in line]
COMMANDS = [
    *["n", "s", "unt", "r", "c", "next", "step", "until", "return", "continue"] * 2,
    *["u", "d", "up", "down", "where", "list", "args", "undisplay", "clear 1"],
    *["p inner(3)", "p Loud(1)", "pp outer(1)", "!scratch = 5", "inner(1)", "p scratch", "p 1 / 0"],
    *["p list(generate(2))", "p Tra()", "p in_loop(1)", "p in_threads(1)", "p fork(1)", "p fail(1)"],
    *["display inner(1)", "display Loud(2)", "debug inner(2)", "debug Tra()", "q", "interact", "EOF", "y"],
    *["commands", "silent", "end", "tbreak inner", "break inner", "b outer", "alias x p 1", "x", "clear"],
    *["watch number changes", "watch total nan", "watch", "unwatch", "until total > 0", "until inner(1)"],
]
TYPED = ["n", "s", "p inner(1)", "display scratch", "interact", "1 + 1", "EOF", "clear", "y", "detach", "c"]
ON_CONSOLE = [
    "ls",
    "where",
    "diff scratch",
    "diff inner(1)",
    "@all n",
    "@all p inner(1)",
    "interrupt",
    "next",
]
GONE = ("gone: ", "the rank went on before", "the rank runs", "interrupted")
END = ["unwatch", f"clear {' '.join(map(str, range(1, 14)))}", "continue"]


class Mazes:
    """The processes of all sequences, and their reports."""

    def __init__(self, directory, flavour):
        self.directory = Path(directory)
        self.runtime = self.directory / "run"
        self.numbers = itertools.count(1)
        self.facts = {}  # of a process by its number: pid, result, status, error
        self.prompts = set()  # the stems of threads that wait at a prompt
        self.environment = {"MPDB_DIR": str(self.runtime), "MPDB_JOB": "states", "MPDB_PDB": flavour}
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(PROGRAMS.parents[2]), os.environ.get("PYTHONPATH")]))
        with theirs:
            self.server = subprocess.Popen(
                [sys.executable, PROGRAMS / "mazes.py", str(theirs.fileno())],
                env={**os.environ, **self.environment, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )

    def fileno(self):
        return self.channel.fileno()

    def pump(self):
        """Read the pending reports. With `fileno`, this object is a channel that can be waited on."""
        with contextlib.suppress(BlockingIOError):
            while True:
                fact = self.channel.recv(1 << 16, socket.MSG_DONTWAIT)
                assert fact, "the server of mazes has ended"
                self._take(json.loads(fact))

    def _take(self, fact):
        known = self.facts.get(fact.pop("number"), {})  # of an earlier sequence: a child of its program
        if "prompt" in fact:
            (self.prompts.add if fact["waits"] else self.prompts.discard)(fact["prompt"])
        else:
            known.update(fact)
        if "status" in fact:
            self.prompts -= {stem for stem in self.prompts if f"+{known['pid']}-" in stem}

    def start(self, **request):
        """Fork a process and return its number, once it has a pid."""
        number = next(self.numbers)
        self.facts[number] = {}
        environment = {**self.environment, **request.pop("environment", {})}
        log = str(self.directory / "log")
        request = {"frees": False, **request, "number": number, "environment": environment, "log": log}
        self.channel.send(json.dumps(request).encode())
        while "pid" not in self.facts[number]:
            wait([self], 1.0)
        return number

    def kill(self, number):
        """Kill a process and its forked children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.facts[number]["pid"], signal.SIGKILL)

    def close(self):
        self.channel.close()
        self.server.wait()

    def find_expected(self):
        """Return the result of each operation without a debugger."""
        ops = sorted(maze.OPS)
        environment = {"MPDB_DISABLE": "1"}
        number = self.start(do="program", ops=ops, in_thread=False, armed=False, environment=environment)
        while "status" not in self.facts[number]:
            wait([self], 1.0)
        log, twice = self.facts.pop(number)["result"]
        return dict(log), twice


PROGRAM = st.fixed_dictionaries(
    {
        "ops": st.lists(st.sampled_from(sorted(maze.OPS)), min_size=1, max_size=3),
        "in_thread": st.booleans(),
        "armed": st.sampled_from([False] * 5 + [True]),
        "frees": st.sampled_from([False] * 7 + [True]),  # all modules at the end, as an interpreter does
    }
)


class Debugging(RuleBasedStateMachine):
    """Random commands from consoles that come and go."""

    mazes = None
    expected = None
    patience = PATIENCE

    def __init__(self):
        super().__init__()
        self.consoles = [self._open_console(), self._open_console()]
        self.programs = {}
        self.killed = set()
        self.is_lost = False
        self.ends_early = False
        (self.mazes.directory / "log").write_text("")

    def _open_console(self):
        return RankRegistry([LocalSource(lambda text: None)], None)

    @initialize(
        programs=st.lists(PROGRAM, min_size=1, max_size=2),
        ends_early=st.sampled_from([True, True, True, False]),
    )
    def start(self, programs, ends_early):
        """Start one or two ranks."""
        for rank, program in enumerate(programs):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(len(programs))}
            number = self.mazes.start(do="program", environment=environment, **program)
            self.programs[number] = program
        self.ends_early = ends_early

    def _await(self, condition, what, channels=()):
        """Wait until a report makes the condition true, and return its value."""
        deadline, moments = time.monotonic() + self.patience, MOMENT
        self.mazes.pump()
        while not (found := condition()):
            if time.monotonic() > deadline:
                self._fail(what)
            wait([self.mazes, *channels], min(moments, 0.02))
            moments *= 1.1
        return found

    def _fail(self, what):
        self.is_lost = True
        type(self).patience = min(PATIENCE, PATIENCE_ONCE_LOST)
        log = (self.mazes.directory / "log").read_text()
        facts = {number: self.mazes.facts[number] for number in self.programs}
        raise AssertionError(f"{what}; prompts {self.mazes.prompts}, {self.programs}, {facts}\n{log}")

    def _is_over(self):
        return all("status" in self.mazes.facts[number] for number in self.programs)

    def _find(self, console=0):
        """Return the ranks at a prompt, or [None] when all programs have ended."""
        if self._is_over():
            return [None]
        return [target for target in self.consoles[console].find() if target.state in ("stopped", "busy")]

    def _choose(self, at, console):
        """Return a rank that can be queried, or None when the programs have ended."""
        found = self._await(lambda: self._find(console), "a program neither ends nor can be reached")
        return found[at % len(found)]

    def _list_prompts(self, target):
        """Return the prompts of a rank's thread; a forked child may have the same label."""
        own = f"+{target.label}+{target.info.get('pid')}-"
        return {stem for stem in self.mazes.prompts if own in stem}

    def _send(self, target, *requests):
        """Send requests and wait for the responses, except for one that needs another thread to continue."""
        answers = []
        for request in requests if target is not None else ():
            try:
                number = target.ask(request)
            except LinkClosedError:
                break
            answer, idle = Answer(target), itertools.count()

            def is_done(answer=answer, number=number, idle=idle):
                others = self.mazes.prompts - self._list_prompts(target)
                return collect(answer, number, None) or (others and next(idle) >= 3)

            self._await(is_done, f"no answer to {request}", [target.link.channel])
            if not answer.frame and not answer.failure:
                target.give_up(number, str(request))
            answers.append(answer)
        return answers

    @rule(command=st.sampled_from(COMMANDS), at=st.integers(0, 3), console=st.integers(0, 1))
    def command(self, command, at, console):
        """Type a line."""
        self._send(self._choose(at, console), {"do": "line", "text": command})

    @rule(line=st.sampled_from(LINES), kind=st.sampled_from(["b", "tbreak", "until"]), at=st.integers(0, 3))
    def set_breakpoint(self, line, kind, at):
        """Break at a line that calls Tra(), at the next line, or nowhere."""
        place = f"{line}" if kind == "until" else f"{maze.__file__}:{line}"
        self._send(self._choose(at, 0), {"do": "line", "text": f"{kind} {place}"})

    @rule(
        do=st.sampled_from(["attach", "detach", "interrupt", "where", "frames", "stacks", "status"]),
        at=st.integers(0, 3),
    )
    def request(self, do, at):
        """Send a request that is not a line."""
        self._send(self._choose(at, 0), {"do": do})

    @rule(text=st.sampled_from(["scratch", "inner(1)", "Loud(3)", "1 / 0", "locals()"]), at=st.integers(0, 3))
    def diff(self, text, at):
        """Evaluate an expression as `diff` does."""
        self._send(self._choose(at, 1), {"do": "evaluate", "text": text})

    @rule(command=st.sampled_from(["next", "continue", "p inner(1)"]))
    def lockstep(self, command):
        """Send the same request to all ranks without waiting for each."""
        self._choose(0, 0)
        ask(self.consoles[0].find(), {"do": "line", "text": command, "command": True}, MOMENT)

    @rule(text=st.sampled_from(["p spin()", "!spin()", "spin()"]), at=st.integers(0, 3))
    def interrupt_what_never_ends(self, text, at):
        """Interrupt an expression after it has begun."""
        target = self._choose(at, 0)
        if target is None or not self._list_prompts(target) or target.info.get("nested"):
            return
        try:
            number = target.ask({"do": "line", "text": text, "nested": False})
        except LinkClosedError:
            return
        answer = Answer(target)

        def is_done():
            if collect(answer, number, None):
                return True
            ask([target], {"do": "interrupt"}, MOMENT)
            return False

        self._await(is_done, f"{text} was not interrupted", [target.link.channel])

    @rule(do=st.sampled_from(["stop", "break"]), line=st.sampled_from(LINES))
    def stop_running(self, do, line):
        """Ask an armed running rank to stop; it may stop by itself before."""
        request = {"do": do, "place": f"{maze.__file__}:{line}"}
        ask(self.consoles[1].find_armed(), request, MOMENT)

    @rule(console=st.integers(0, 1), text=st.sampled_from(["next", "p inner(1)", "continue"]))
    def close_console(self, console, text):
        """Close a console while a rank works for it."""
        target = self._choose(0, console)
        if target is not None:
            with contextlib.suppress(LinkClosedError):
                target.ask({"do": "line", "text": text})
        self.consoles[console].close()
        self.consoles[console] = self._open_console()

    @rule(
        typed=st.lists(st.sampled_from(TYPED), min_size=1, max_size=4),
        then=st.lists(st.sampled_from(ON_CONSOLE), max_size=2),
        moments=st.sampled_from([0, 2, 10, 50]),
        at=st.integers(0, 3),
    )
    def use_and_kill_console(self, typed, then, moments, at):
        """Attach with a console in its own process, and kill it if it has not finished after some moments."""
        target = self._choose(at, 0)
        if target is None:
            return
        number = self.mazes.start(do="console", lines=[f"attach {target.label}", *typed, *then])
        known, left = self.mazes.facts[number], itertools.count()
        self._await(lambda: "status" in known or next(left) >= moments, "cannot come")
        self.mazes.kill(number)
        self._await(lambda: "status" in known, "the console does not end")
        assert "error" not in known, known["error"]

    @rule(at=st.integers(0, 3))
    def kill_rank(self, at):
        """Kill the process of a rank as the console does."""
        target = self._choose(at, 0)
        numbers = [n for n in self.programs if target and self.mazes.facts[n]["pid"] == target.info["pid"]]
        if len(self.programs) - len(self.killed) > 1 and numbers:
            self.killed.update(numbers)
            with contextlib.suppress(LinkClosedError):
                target.link.kill()
            self._await(lambda: "status" in self.mazes.facts[numbers[0]], "a killed rank does not end")

    @rule()
    def remove_files(self):
        """Remove the socket files, as a cleaner of /tmp may; the server recreates them."""
        for path in self.mazes.runtime.glob("*.sock"):
            path.unlink(missing_ok=True)

    @invariant()
    def every_prompt_is_reachable(self):
        """Check that each thread at a prompt has a socket file, and that its server and prompt respond."""
        self.mazes.pump()
        for stem in tuple(self.mazes.prompts):
            what = f"{stem} waits, and cannot be asked"
            (target,) = self._await(lambda stem=stem: self._reach(stem), what)
            for answer in self._send(target, {"do": "evaluate", "text": "1 + 1"}):
                if answer.failure and not answer.failure.startswith(GONE):
                    self._fail(f"the prompt of {stem} does not work: {answer.failure}")

    def _reach(self, stem):
        """Return [target] if a thread responds through its file, [None] if it has continued, else []."""
        if stem not in self.mazes.prompts:
            return [None]
        targets = self.consoles[0].refresh()
        link = self.consoles[0].sources[0].refresh().get(stem)
        targets = [target for target in targets if target.link is link]
        return [
            answer.target for answer in ask(targets, {"do": "status"}, self.patience) if not answer.failure
        ]

    def teardown(self):
        """Let everything continue: the programs must end with their results and leave nothing behind."""
        try:
            if not self.is_lost:
                self._end_programs()
        finally:
            for number in self.programs:
                self.mazes.kill(number)
            for number in self.programs:
                while "status" not in self.mazes.facts[number]:
                    wait([self.mazes], 1.0)
            for console in self.consoles:
                console.close()
            for path in self.mazes.runtime.glob("*"):
                path.unlink(missing_ok=True)
            self.mazes.prompts.clear()
            self.mazes.facts.clear()

    def _end_programs(self):
        deadline = time.monotonic() + self.patience
        while (found := self._await(self._find, "a program neither ends nor can be reached")) != [None]:
            ask(
                found, {"do": "status"}, self.patience
            )  # another console may have typed a line that leads to a question
            for target in found:
                self._let_go(target)
            if time.monotonic() > deadline:
                self._fail("a program does not end")
        for number, program in self.programs.items():
            fact, (values, twice) = self.mazes.facts[number], self.expected
            result = [[[name, values[name]] for name in program["ops"]], twice]
            if number in self.killed and fact["status"] == -signal.SIGKILL:
                continue  # else it had ended before
            if (fact.get("result"), fact["status"]) != (result, 0):
                self._fail("another result")
        self._await(lambda: not self._list_sockets(), "sockets left open")

    def _list_sockets(self):
        """Return the socket files. A console that looks removes those of killed processes."""
        self.consoles[0].refresh()
        return list(self.mazes.runtime.glob("*.sock"))

    def _let_go(self, target):
        if target.info.get("nested") is True:
            end = "end" if "com" in target.info["prompt"] else "EOF"
            self._send(target, {"do": "line", "text": end})
            return
        lines = [*END] if not self.ends_early else ["!__import__('os').environ['MPDB_DISABLE'] = '1'", *END]
        self._send(target, *({"do": "line", "text": line, "nested": False} for line in lines))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flavour", ["pdb", "pdbpp"])
def test_no_sequence_loses_a_rank_or_changes_the_result(flavour, monkeypatch):
    directory = tempfile.mkdtemp(prefix="mpdb-states-", dir="/tmp")
    mazes = Mazes(directory, flavour)
    try:
        monkeypatch.setenv("MPDB_DIR", str(mazes.runtime))
        names = {"mazes": mazes, "expected": mazes.find_expected()}
        machine = type("Sequences", (Debugging,), names)
        machine.TestCase.settings = settings(
            max_examples=SEQUENCES,
            stateful_step_count=10,
            deadline=None,
            database=None,
            derandomize="MPDB_TEST_SEQUENCES" not in os.environ,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        machine.TestCase().runTest()
    finally:
        mazes.close()
        shutil.rmtree(directory, ignore_errors=True)
