"""A project folder with cases of a tiny model, and the command line started as a user would start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked.python import ForkedPython

from moeverify.verification.controller.machine import count_gpus
from moeverify.verification.launch import monitor

# xdist workers share the cores, so each gets few threads: busy-waiting threads would slow the other workers.
# With more threads, they sleep while waiting: busy waiting makes tests five times as slow on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Without a GPU, kernels run in Triton's interpreter. It must be enabled before anything imports Triton.
# Commands and ranks that a test starts enable it themselves.
if count_gpus() == 0:
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts pytest in the background disables SIGINT, also for processes that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and `nohup` disables SIGHUP

# Commands print the same output on a CI server; the workflow tests set these variables themselves.
for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
    os.environ.pop(name, None)

RECIPE = """\
model: {vocab_size: 32, hidden: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, head_dim: 8, ffn_hidden: 16}
data: {batch: 4, seq_len: 4}
steps: 1
"""
# Environment that would change moeverify's output: that of a CI server, and the terminal width.
FROM_OUTSIDE = ("CI", "COLUMNS")
# All tests in these folders start processes; elsewhere a test or file is marked explicitly.
STARTS_PROCESSES = ("debugger", "golden", "ranks")
_FAST = 2
CASE = "recipe: tiny\nlayout: {dp_shard: 2}\nchecks: {repeat: never}\n"


def pytest_configure(config: pytest.Config) -> None:
    """Let workers take files in the order of `pytest_collection_modifyitems`, not by number of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder, and skip GPU tests on machines without a GPU.

    Files that start processes come first: a long file at the end would leave the other workers idle.
    """
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder) and item.path.relative_to(folder).parts[0] in STARTS_PROCESSES:
            item.add_marker("ranks")
        if item.get_closest_marker("gpu") is not None and count_gpus() == 0:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    last = {item.path: _FAST for item in items}
    for item in items:
        last[item.path] = min(last[item.path], _rank_by_time(item))
    items.sort(key=lambda item: last[item.path])


def _rank_by_time(item: pytest.Item) -> int:
    """Return a sort key: slower items get smaller numbers."""
    if item.path.suffix == ".yaml" or item.get_closest_marker("timeout") is not None:
        return 0  # all cases are one launch and may have a raised timeout
    return 1 if item.get_closest_marker("ranks") or item.get_closest_marker("slow") else _FAST


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all cases to one worker under `--dist loadfile`: others would only wait for the same launch."""
    from xdist.scheduler import LoadFileScheduling

    class OneLaunch(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "cases" if file.endswith(".yaml") else file

    return OneLaunch(config, log) if config.getoption("dist") == "loadfile" else None


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass
class Project:
    """A folder with `cases/` and `golden/`. `shared` is the cache of full goldens that all tests share."""

    folder: Path
    shared: Path
    python: ForkedPython
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    @property
    def goldens(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.folder / "golden").glob("*"))}

    def write_case(self, name: str, text: str = CASE) -> None:
        (self.folder / "cases" / f"{name}.yaml").write_text(text)

    def start(self, *words: str, module: str = "moeverify") -> subprocess.Popen[str]:
        """Start a command in the folder, with its own folder for temporary files."""
        left_out = (*FROM_OUTSIDE, "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "TRITON_INTERPRET")
        environment = {key: value for key, value in os.environ.items() if key not in left_out}
        environment |= {
            "TMPDIR": str(self.scratch),
            "XDG_CACHE_HOME": str(self.shared),
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }
        code = f"import sys; sys.argv[0] = {module!r}; from moeverify.cli import main; main()"
        command = [*self.python.command(), "-c", code]
        if module != "moeverify":
            command = [sys.executable, "-m", module]
        return subprocess.Popen(
            [*command, *words],
            cwd=self.folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def do(self, *words: str, module: str = "moeverify") -> Done:
        """Run a command to its end. Its ranks are killed too when it takes too long."""
        process = self.start(*words, module=module)
        try:
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()  # which ends the ranks too; no effect on an ended process
            process.communicate()
        return Done(process.returncode, out, err)

    def run(self, *words: str) -> tuple[Done, Mapping[str, Any]]:
        """Run `moeverify run` and return its exit state and the JSON of each case."""
        path = self.folder / "result.json"
        path.unlink(missing_ok=True)
        done = self.do("run", *words, "--device", "cpu", "--json", str(path))
        cases = json.loads(path.read_text())["cases"] if path.exists() else []
        return done, {case["name"]: case for case in cases}

    def find_remains(self, seconds: float = 10.0) -> list[str]:
        """Return processes and files that still exist after this time; there should be none."""
        end = time.monotonic() + seconds
        while (left := [*self._find_processes(), *self._find_files()]) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def _find_files(self) -> list[str]:
        # torch makes a per-user compiler folder when the first optimizer is built; pytest has one too.
        others = ("torchinductor_", "pytest-of-")
        return [str(path) for path in self.scratch.iterdir() if not path.name.startswith(others)]

    def _find_processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and str(self.scratch) in " ".join(
                    process.cmdline()
                ):
                    found.append(f"{process.pid} {process.cmdline()}")
            except psutil.Error:
                continue
        return found


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as if not on a CI server, where a missing golden is an error."""
    for name in FROM_OUTSIDE:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def python(request: pytest.FixtureRequest) -> Iterator[ForkedPython]:
    """Fork the agents of launches from one process that has imported torch, to save the import's time."""
    python = ForkedPython()
    if any(item.get_closest_marker("ranks") for item in request.session.items):
        python.command()  # start it now: it dies with the thread that starts it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "agent_command", python.agent_command)
        yield python
    python.stop()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def known_goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of full goldens for all workers: computing one takes longer than running a case.

    It is for tests of other things whose recipes are often the same, such as that of `make_case`.
    """
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "known-goldens"


@pytest.fixture(scope="session")
def make_project(shared: Path, python: ForkedPython) -> Callable[..., Project]:
    """Return a function that makes a project with these cases in a folder."""

    def do(folder: Path, *names: str) -> Project:
        project = Project(folder, shared, python)
        (folder / "cases" / "recipes").mkdir(parents=True)
        (folder / "cases" / "recipes" / "tiny.yaml").write_text(RECIPE)
        (folder / "scratch").mkdir()
        for name in names:
            project.write_case(name)
        return project

    return do
