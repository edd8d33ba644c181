"""The agent process, which starts the ranks of one launch through torch elastic.

`python -m moeverify.verification.launch.agent PLAN PARENT` imports torch and the entry module once
and forks the ranks afterwards. A launch of eight ranks therefore pays for one import instead of eight.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moeverify.gc_pause import uncollected
from moeverify.verification.launch.die_with_parent import adopt_orphans, die_with, end_descendants
from moeverify.verification.launch.plan import LaunchPlan, write_atomically
from moeverify.verification.launch.world import set_interpreter

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_LIMITS = ("timeout", "join_timeout", "close_timeout", "heartbeat", "read_timeout")
# Limits of the rendezvous in seconds: the controller, whose clock may be slower, ends a launch much earlier.
_PATIENT = {**dict.fromkeys(_LIMITS, 7 * 86400), "keep_alive_max_attempt": 100_000}

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Run the ranks of the plan in `sys.argv[1]` and write `launch.json` if the launch fails."""
    die_with(int(sys.argv[2]))
    plan_path = Path(sys.argv[1])
    plan = LaunchPlan.read(plan_path)
    _set_up(plan.device, plan.search_path)
    run_agent(plan_path)


def prepare(entry: str, device: str) -> None:
    """Set up this process and import everything that agents of an entry and a device, and their ranks, need."""
    _set_up(device, ())
    with contextlib.suppress(Exception):  # the launch itself reports the error
        preload(entry, device)


def adopt(plan: LaunchPlan, file: int) -> None:
    """Take over the controller's environment, folder and search path in a forked agent.

    `file` is a descriptor of the JSON that `forked_agents` writes.
    """
    with os.fdopen(file, "rb") as stream:
        stream.seek(0)
        state = json.load(stream)
    os.environ.clear()
    os.environ.update(state["environment"])
    os.chdir(state["folder"])
    os.umask(state["umask"])
    sys.path[:] = plan.search_path
    _set_up(plan.device, ())


def run_agent(plan_path: Path) -> None:
    """Run the ranks of a plan, wait for them, and exit. Requires a process that is already set up."""
    plan = LaunchPlan.read(plan_path)
    adopt_orphans()
    end = _launch(plan, plan_path)
    end_descendants()  # processes that users' functions have forked
    if end:
        write_atomically(plan.launch_folder / "launch.json", json.dumps(end))
    # Skip the interpreter teardown: after `import torch` it takes a third of a second and has no effect.
    os._exit(1 if end else 0)


def _set_up(device: str, search_path: Sequence[str]) -> None:
    sys.path.extend(entry for entry in search_path if entry not in sys.path)
    _set_environment()
    set_interpreter(device)
    _set_logging()


def _set_environment() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The runtime's default device check initializes CUDA, which makes CUDA unusable in a forked rank.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if sys.platform == "linux":
        # All ranks run on this host. Without this, gloo resolves the host name, which can take seconds or
        # fail.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _set_logging() -> None:
    """Send the log messages of torch elastic to standard error unformatted.

    The formatter of torch imports the compiler before its first message. That takes a second, during which
    elastic does not stop the peers of a failed rank.
    """
    # Elastic runs a thread of its own at the time of the fork. The thread holds no lock that the ranks use.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())


def _launch(plan: LaunchPlan, plan_path: Path) -> dict[str, object]:
    """Run the ranks. Return a description of the failure, or an empty dict on success."""
    try:
        preload(plan.entry, plan.device)
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from moeverify.verification.launch.logs import RankLogs

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=plan.num_ranks,
            run_id=f"moeverify-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs=_PATIENT,
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.05,
            start_method="fork",
            logs_specs=RankLogs(plan.launch_folder),
        )
    except Exception:
        return {"error": traceback.format_exc(), "first": None, "exits": {}}
    gate = Gate()
    processes = _ProcessTable(plan.num_ranks, gate.open)
    try:
        elastic_launch(config, run_entry)(plan.entry, str(plan_path), str(os.getpid()), gate)
    except ChildFailedError as error:
        return {"error": "", "first": error.get_first_failure()[0], "exits": processes.read()}
    except Exception:
        return {"error": traceback.format_exc(), "first": None, "exits": processes.read()}
    return {}


class Gate:
    """Barrier that holds each forked rank until all ranks are forked.

    The barrier is a pipe without data: a read ends when the agent closes its write end.

    The thread of the store in this process looks up the host name of each rank that connects, and the
    resolver of glibc takes a lock. A rank that is forked while the lock is held can never resolve a name.
    Without the barrier, about one launch in thirty with eight ranks hung in the connection to the store on
    a busy machine.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def open(self) -> None:
        """Release the ranks. Called in the process that forks them."""
        os.close(self._writer)

    def wait(self) -> None:
        """Block until all ranks are forked. Called in a rank."""
        os.close(self._writer)
        os.read(self._reader, 1)
        os.close(self._reader)


class _ProcessTable:
    """Process handles of the ranks: elastic reports the exit status of the first failed rank only.

    A thread calls `on_all` once all ranks are forked.
    """

    def __init__(self, num_ranks: int, on_all: Callable[[], None]) -> None:
        self._num_ranks = num_ranks
        self._on_all = on_all
        self._processes: dict[int, BaseProcess] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def read(self) -> dict[int, int]:
        """Return the exit status of each ended rank: minus the signal number if a signal ended it."""
        exits = {rank: process.exitcode for rank, process in self._processes.items()}
        return {rank: status for rank, status in exits.items() if status is not None}

    def _watch(self) -> None:
        while len(self._processes) < self._num_ranks:
            time.sleep(0.02)
            # `active_children()` would reap the processes before elastic does. The processes are named in
            # start order, beginning with `ForkProcess-1`.
            for process in list(getattr(multiprocessing.process, "_children", ())):
                self._processes.setdefault(int(process.name.rpartition("-")[2]) - 1, process)
        self._on_all()


def _name_methods_quickly() -> None:
    """Make torch elastic's rendezvous look up the name of a method without the source of every frame.

    It names a method in each of its about ten messages, and `inspect.stack` compares every frame with all
    imported modules. That takes half a second of CPU time in each launch.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def name_method(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = name_method


def preload(entry: str, device: str) -> None:
    """Import the modules that every rank needs. An entry that fails to import fails again in the ranks."""
    # Imports leave hardly any garbage, and the searches for it take a third of their time.
    with uncollected():
        importlib.import_module("torch.distributed.launcher.api")
        _name_methods_quickly()
        importlib.import_module("moeverify.verification.launch.rank")
        if not entry.endswith(".py"):
            with contextlib.suppress(Exception):
                importlib.import_module(entry)
        from moeverify.verification.launch.caches import find_imported

        find_imported()
        if device != "cpu":
            # The number that this collection counts makes full collections in the ranks rare. On the CPU
            # `collect_less` does.
            gc.collect()
        # Freeze the imported objects: garbage collection in the ranks skips them, and their pages stay shared.
        gc.freeze()


def run_entry(entry: str, plan_path: str, agent: str, gate: Gate) -> None:
    """Run `entry` in this forked rank like `python -m ENTRY PLAN`, or `python ENTRY PLAN` for a file."""
    from moeverify.verification.launch.failure_reporter import leave_traces

    die_with(int(agent))
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [entry, plan_path]
    # Install the fault handler before the entry runs, which may fail before its first job. It needs the
    # open file.
    with leave_traces(Path(plan_path).parent, int(os.environ["RANK"])):
        gate.wait()
        _end_as_main(entry)


def _end_as_main(entry: str) -> None:
    try:
        _run_as_main(entry)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except BaseException:
        # Elastic does not print the traceback.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _run_as_main(entry: str) -> None:
    if entry.endswith(".py"):
        runpy.run_path(entry, run_name="__main__")
        return
    with warnings.catch_warnings():
        # The entry was imported before the fork. It runs again here as the main module.
        warnings.filterwarnings("ignore", message=".*found in sys.modules.*", category=RuntimeWarning)
        runpy.run_module(entry, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
