"""Whatever is done at the prompts: a stopped thread has a way in, and the program computes what it would alone.

Programs run in threads of the test's own process, so that thousands of sequences are driven through the real
sockets in minutes: MPDB_TEST_SEQUENCES=2000 asks for as many new ones of each prompt. Without it they are the same
ones each time.
"""

import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import maze

from multiprocessing_pdb.console.broadcast import Answer, collect
from multiprocessing_pdb.console.link import LinkClosedError, wait
from multiprocessing_pdb.console.registry import RankRegistry
from multiprocessing_pdb.console.source import LocalSource
from multiprocessing_pdb.rank import debugger, endpoint, server, session
from multiprocessing_pdb.rank.process_state import PROCESS

SEQUENCES = int(os.environ.get("MPDB_TEST_SEQUENCES", "25"))  # for each of pdb and pdbpp
PATIENCE = float(
    os.environ.get("MPDB_TEST_PATIENCE", "300")
)  # a lost rank is lost for ever, a slow one is not
MOMENT = 0.002
PROMPTS = []
LINES = [
    number for number, line in enumerate(Path(maze.__file__).read_text().splitlines(), 1) if "Tra(" in line
]
COMMANDS = [
    *["next", "step", "until", "return", "continue"] * 3,
    *["up", "down", "where", "list", "args", "undisplay", "clear 1"],
    *["p inner(3)", "p Loud(1)", "pp outer(1)", "!scratch = 5", "inner(1)", "p scratch", "p 1 / 0"],
    *["p list(generate(2))", "p Tra()", "p in_loop(1)", "p in_threads(1)"],
    *["display inner(1)", "display Loud(2)", "debug inner(2)", "debug Tra()", "q", "interact", "EOF", "y"],
    *["commands", "silent", "end", "p fail(1)", "tbreak inner", "break inner", "alias x p 1", "x", "clear"],
]


class Program(threading.Thread):
    """One run of the maze."""

    def __init__(self, ops):
        super().__init__(name="program", daemon=True)
        self.ops = ops
        self.result = None

    def run(self):
        """Play, and keep what was computed."""
        try:
            self.result = maze.play(self.ops)
        except BaseException as error:
            self.result = error


# Sessions whose thread waits at a prompt, whatever the debugger itself believes. The frames of running threads are
# not walked for it: that is not safe in CPython. The name makes steps pass over it, as over the debugger's own code.
_WATCH_PROMPTS = """
def read_line(self):
    prompts.append(self)
    try:
        return original(self)
    finally:
        prompts.remove(self)
"""


def watch_prompts(monkeypatch):
    """Keep the list of prompts from now on."""
    names = {
        "__name__": "multiprocessing_pdb.watch",
        "prompts": PROMPTS,
        "original": session.Session._read_line,
    }
    exec(_WATCH_PROMPTS, names)
    PROMPTS.clear()
    monkeypatch.setattr(session.Session, "_read_line", names["read_line"])


class Debugging(RuleBasedStateMachine):
    """Random commands from consoles that come and go."""

    directory = ""

    def __init__(self):
        super().__init__()
        self.consoles = [self._open_console(), self._open_console()]
        self.program = None

    def _open_console(self):
        return RankRegistry([LocalSource(lambda text: None)], None)

    @initialize(ops=st.lists(st.sampled_from(sorted(maze.OPS)), min_size=1, max_size=3))
    def start(self, ops):
        """Start the program."""
        self.program = Program(ops)
        self.program.start()

    def _await(self, condition, what, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}; {self._explain()}"
            time.sleep(MOMENT)

    def _explain(self):
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            "".join([f"{threads.get(ident)}\n", *traceback.format_stack(frame)[-6:]])
            for ident, frame in sys._current_frames().items()
        ]
        return f"ops {self.program.ops}, prompts {PROMPTS}\n" + "\n".join(stacks)

    def _choose(self, at, console):
        """Return a rank that can be asked something, or None when the program is over."""
        registry = self.consoles[console]

        def stopped():
            if not self.program.is_alive():
                return [None]
            return [target for target in registry.find() if target.state in ("stopped", "busy")]

        self._await(lambda: bool(stopped()), "the program neither ends nor can be reached")
        found = stopped()
        return found[at % len(found)] if found else None

    def _send(self, target, request):
        """Send a request and wait for its answer, but not for one that only another rank's going on can bring."""
        if target is None:
            return
        try:
            number = target.ask(request)
        except LinkClosedError:
            return
        answer, deadline, idle = Answer(target), time.monotonic() + PATIENCE, 0
        while not collect(answer, number, None) and idle < 3:
            assert time.monotonic() < deadline, f"no answer to {request}; {self._explain()}"
            wait([target.link.channel], MOMENT)
            others = any(found._state == "stopped" and found._requests.empty() for found in tuple(PROMPTS))
            idle = idle + 1 if others else 0
        if idle:
            target.give_up(number, str(request))

    @rule(command=st.sampled_from(COMMANDS), at=st.integers(0, 3), console=st.integers(0, 1))
    def command(self, command, at, console):
        """Type a line."""
        self._send(self._choose(at, console), {"do": "line", "text": command})

    @rule(
        line=st.sampled_from(LINES), kind=st.sampled_from(["break", "tbreak", "until"]), at=st.integers(0, 3)
    )
    def set_breakpoint(self, line, kind, at):
        """Stop at a line that calls Tra(), the next one, or none."""
        place = f"{line}" if kind == "until" else f"{maze.__file__}:{line}"
        self._send(self._choose(at, 0), {"do": "line", "text": f"{kind} {place}"})

    @rule(request=st.sampled_from(["attach", "detach", "interrupt", "where", "stacks", "status"]))
    def request(self, request):
        """Ask for something that is no line."""
        self._send(self._choose(0, 0), {"do": request})

    @rule(text=st.sampled_from(["scratch", "inner(1)", "Loud(3)", "1 / 0", "locals()"]))
    def diff(self, text):
        """Evaluate as diff does."""
        self._send(self._choose(0, 1), {"do": "evaluate", "text": text})

    @rule(console=st.integers(0, 1), text=st.sampled_from(["next", "p inner(1)", "continue"]))
    def kill_console(self, console, text):
        """Let a console vanish while a rank works for it."""
        target = self._choose(0, console)
        if target is not None:
            target.ask({"do": "line", "text": text})
        self.consoles[console].close()
        self.consoles[console] = self._open_console()

    @rule()
    def remove_files(self):
        """Remove the socket files, as a cleaner of /tmp may; the server makes them again by itself."""
        for path in Path(self.directory).glob("*.sock"):
            path.unlink(missing_ok=True)

    @invariant()
    def every_prompt_is_reachable(self):
        """A thread that waits at a prompt has a socket file, and its server answers."""
        if self.program is None:
            return
        for found in tuple(PROMPTS):
            name = f"{found.rank.file_stem()}.sock"
            stem = name.removesuffix(".sock")
            self._await(
                lambda found=found, name=name: found not in PROMPTS or (Path(self.directory) / name).exists(),
                f"a prompt of {name} without a way in",
            )
            # Again and again: it may go on and stop anew while the console looks.
            self._await(
                lambda found=found, stem=stem: (
                    stem in self.consoles[0].sources[0].refresh() or found not in PROMPTS
                ),
                f"{name} cannot be connected to",
            )

    def teardown(self):
        """Let everything run on; the program must end with its result, and leave nothing."""
        if self.program is None:
            return
        registry = self.consoles[0]
        deadline = time.monotonic() + PATIENCE
        while self.program.is_alive() and time.monotonic() < deadline:
            for target in registry.find():
                if target.info.get("nested") is True:
                    self._send(
                        target, {"do": "line", "text": "end" if "com" in target.info["prompt"] else "EOF"}
                    )
                elif target.state in ("stopped", "busy"):
                    self._send(target, {"do": "line", "text": "clear 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"})
                    self._send(target, {"do": "line", "text": "continue", "command": True})
            self.program.join(MOMENT)
        assert not self.program.is_alive(), f"lost; {self._explain()}"
        assert self.program.result == expect(self.program.ops)
        self._await(lambda: not PROCESS.has_open(), "sessions left open")
        for console in self.consoles:
            console.close()
        assert not list(Path(self.directory).glob("*.sock"))


_EXPECTED = {}


def expect(ops):
    """Return what the program computes without a debugger."""
    key = tuple(ops)
    if key not in _EXPECTED:
        os.environ["MPDB_DISABLE"] = "1"
        try:
            _EXPECTED[key] = maze.play(ops)
        finally:
            del os.environ["MPDB_DISABLE"]
    return _EXPECTED[key]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flavour", ["pdb", "pdbpp"])
def test_no_sequence_loses_a_rank_or_changes_the_result(flavour, monkeypatch):
    directory = tempfile.mkdtemp(prefix="mpdb-states-", dir="/tmp")
    shutil.rmtree(directory)
    monkeypatch.setenv("MPDB_DIR", directory)
    monkeypatch.setenv("MPDB_JOB", "states")
    monkeypatch.setenv("MPDB_PDB", flavour)
    monkeypatch.setattr(server, "_TICK_SECONDS", 0.02)
    for module in (endpoint, session, debugger):
        monkeypatch.setattr(module, "write_stderr", lambda text: None)
    monkeypatch.setattr(Debugging, "directory", directory)
    watch_prompts(monkeypatch)
    debugger._load_class.cache_clear()
    limits = settings(
        max_examples=SEQUENCES,
        stateful_step_count=12,
        deadline=None,
        database=None,
        derandomize="MPDB_TEST_SEQUENCES" not in os.environ,
        phases=[
            Phase.generate
        ],  # a lost rank stays in this process, and each shorter sequence would be lost with it
        suppress_health_check=list(HealthCheck),
    )
    machine = type("Sequences", (Debugging,), {})
    machine.TestCase.settings = limits
    try:
        case = machine.TestCase()
        case.runTest()
    finally:
        debugger._load_class.cache_clear()
        shutil.rmtree(directory, ignore_errors=True)
