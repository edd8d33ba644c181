"""The same jobs on ranks that torchrun, srun or a user's script started.

Every rank calls `serve_external`; rank 0 hears of the outcomes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from moeverify.collectives.flight_recorder import NUM_SLOTS
from moeverify.launch.evidence import read_tail
from moeverify.launch.plan import Backend, Device, Job, JobOutcome, job_folder
from moeverify.launch.root_cause_rank import find_origin
from moeverify.launch.runner import JobRunner, RunJob
from moeverify.launch.world import ExternalWorld, complete_environment, set_interpreter
from moeverify.results.failure import Cause, End, JobFailure, RankEnd
from moeverify.results.run import RankReport
from moeverify.results.trace import CollectiveRecord

EXIT_FAILED = 3
_COLLECT_LIMIT = 5.0
_ANSWER_LIMIT = 15.0
_POLL = 0.05

OnOutcome = Callable[[JobOutcome], None]


def serve_external(
    jobs: Sequence[Job],
    folder: Path,
    entry: str,
    on_outcome: OnOutcome,
    *,
    device: Device = "cpu",
    backend: Backend = "nccl",
) -> None:
    """Run the jobs in this rank and its peers; rank 0 calls `on_outcome` for every job, in order.

    `entry` is a module with `run_job`, imported here: what it imports reads variables that are set first. Every
    rank must call it with the same jobs. It returns when all jobs are done. Ranks that someone else
    started cannot be started anew: when a job fails or hangs, rank 0 calls `on_outcome` for it and, as
    `unstarted`, for all that come after it, perhaps from another thread; then every rank ends with status 3.
    A job for more ranks than there are is `unstarted` too, and the others go on.

    Raises: RuntimeError if no launcher's variables are set.
    """
    world = complete_environment()
    set_interpreter(device)
    if world is None:
        raise RuntimeError("this process is no rank: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are unset")
    run_job: RunJob = importlib.import_module(entry).run_job
    session = _Session(world, jobs, Path(folder).resolve(), on_outcome, device, backend)
    session.run(run_job)


class _Session:
    """All jobs in this rank, and what it does when one of them fails anywhere.

    The mailbox is a second connection to the store, since one that waits is locked. Rank r leaves its report
    at `I/report/r` and then sets `I/failed`; every other rank sees that, and reports too; rank 0 collects.
    """

    def __init__(
        self,
        world: ExternalWorld,
        jobs: Sequence[Job],
        folder: Path,
        on_outcome: OnOutcome,
        device: Device,
        backend: Backend,
    ) -> None:
        self._world = world
        self._jobs = jobs
        self._folder = folder
        self._on_outcome = on_outcome
        self._index = 0
        self._began = time.monotonic()
        self._failing = threading.Lock()
        store, _, _ = next(rendezvous("env://"))
        mailbox, _, _ = next(rendezvous("env://"))
        self._store = PrefixStore("moeverify", store)
        self._mailbox = PrefixStore("moeverify-mail", mailbox)
        self._own_folder = folder / "launch-1"
        self._own_folder.mkdir(parents=True, exist_ok=True)
        self._runner = JobRunner(
            self._store,
            world.rank,
            world.local_rank,
            device,
            backend,
            self._own_folder,
            on_raise=self._fail_by_error,
            on_hang=self._fail_by_hang,
            on_tick=self._look_for_failure,
            catch_terminate=False,
        )

    def run(self, run_job: RunJob) -> None:
        """Run all jobs."""
        gc.freeze()  # The imports stay for good: collecting after a job need not look at them.
        with _watch_signals(self._fail_by_signal), self._runner.trace:
            for index, job in enumerate(self._jobs):
                self._index = index
                self._began = time.monotonic()
                if job.num_ranks > self._world.world_size:
                    num_started = self._world.world_size
                    failure = JobFailure(
                        cause=Cause.TOO_FEW, num_needed=job.num_ranks, num_started=num_started
                    )
                    self._report_outcome("unstarted", failure)
                    continue
                done = f"done/{self._index}"
                if self._world.rank >= job.num_ranks:
                    self._store.wait([done], timedelta(days=365))
                    continue
                folder = job_folder(self._folder, self._index)
                folder.mkdir(parents=True, exist_ok=True)
                result = self._runner.run(self._index, job, folder, run_job)
                if self._world.rank == 0:
                    self._store.set(done, "1")
                    self._report_outcome("done", None, result=result, seconds=time.monotonic() - self._began)
            self._runner.close()
            self._leave()

    def _leave(self) -> None:
        """Let the rank that may host the store be the last."""
        if self._store.add("left", 1) == self._world.world_size:
            self._store.set("all-left", "1")
        self._store.wait(["all-left"], timedelta(seconds=60))

    def _report_outcome(self, state: Any, failure: JobFailure | None, **rest: Any) -> None:
        if self._world.rank == 0:
            name = self._jobs[self._index].name
            self._on_outcome(
                JobOutcome(job=name, index=self._index, state=state, failure=failure, launch=1, **rest)
            )

    def _look_for_failure(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._mailbox.check([f"{self._index}/failed"]):
                self._fail(self._runner.failure_reporter.describe_state(RankEnd(how=End.STOPPED)))

    def _fail_by_error(self, error: BaseException) -> None:
        self._fail(self._runner.failure_reporter.describe_error(error))

    def _fail_by_hang(self) -> None:
        end = RankEnd(how=End.OVER_TIME, timeout=self._jobs[self._index].timeout)
        self._fail(self._runner.failure_reporter.describe_state(end), patience=_POLL * 10)

    def _fail_by_signal(self, number: int) -> None:
        end = RankEnd(how=End.SIGNALLED, signal=number)
        self._fail(self._runner.failure_reporter.describe_state(end))

    def _fail(self, report: RankReport, patience: float = 0.0) -> NoReturn:
        """Leave this rank's report, see to it that rank 0 has passed on the outcome, and end the process.

        `patience` lets peers, whose clocks began a moment later, notice for themselves.
        """
        if not self._failing.acquire(blocking=False):
            time.sleep(3600.0)  # Another thread of this rank is at it, and ends the process.
        self._runner.failure_reporter.disarm()
        try:
            self._report(report, patience)
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(EXIT_FAILED)

    def _report(self, report: RankReport, patience: float) -> None:
        if self._world.rank < self._jobs[self._index].num_ranks:
            content = {
                "report": report.model_dump(),
                "time": time.time(),
                "records": [record.model_dump() for record in self._runner.trace.records()[-NUM_SLOTS:]],
            }
            self._mailbox.set(f"{self._index}/report/{report.rank}", json.dumps(content))
        time.sleep(patience)
        self._mailbox.set(f"{self._index}/failed", "1")
        answered = f"{self._index}/answered"
        if self._world.rank != 0:
            self._wait_for([answered], _ANSWER_LIMIT)
            return
        self._collect_failure()
        self._mailbox.set(answered, "1")
        time.sleep(_POLL * 4)  # This process may host the store that its peers still read.

    def _collect_failure(self) -> None:
        """Collect the reports of all ranks, as far as they come, and pass on how everything ends."""
        num_ranks = self._jobs[self._index].num_ranks
        keys = {rank: f"{self._index}/report/{rank}" for rank in range(num_ranks)}
        self._wait_for(list(keys.values()), _COLLECT_LIMIT)
        reports: list[RankReport] = []
        times: dict[int, float] = {}
        traces: dict[int, list[CollectiveRecord]] = {}
        for rank, key in keys.items():
            traces[rank] = []
            if not self._mailbox.check([key]):
                stack = read_tail(self._own_folder / f"rank-{rank}.stack")
                reports.append(RankReport.of(rank, RankEnd(how=End.SILENT), stack=stack))
                continue
            content = json.loads(self._mailbox.get(key))
            reports.append(RankReport.model_validate(content["report"]))
            times[rank] = content["time"]
            traces[rank] = [CollectiveRecord.model_validate(record) for record in content["records"]]
        origin = find_origin(reports, times, traces)
        failed = self._jobs[self._index].name
        seconds = time.monotonic() - self._began
        self._report_outcome(
            "hung" if origin.is_hang else "failed",
            origin.make_failure(),
            rank_reports=origin.reports,
            seconds=seconds,
        )
        for index in range(self._index + 1, len(self._jobs)):
            self._index = index
            self._report_outcome("unstarted", JobFailure(cause=Cause.ENDED_BEFORE, earlier_job=failed))

    def _wait_for(self, keys: list[str], limit: float) -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end and not self._mailbox.check(keys):
            time.sleep(_POLL)


@contextlib.contextmanager
def _watch_signals(on_signal: Callable[[int], None]) -> Any:
    """Call `on_signal` in a thread of its own on SIGTERM or SIGINT, also while the main thread is in C code.

    Python's own handlers wait for the main thread, which may sit in a collective for ever.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = (signal.SIGTERM, signal.SIGINT)
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while byte := os.read(reader, 1):
            if byte[0] in numbers:
                on_signal(byte[0])

    thread = threading.Thread(target=watch, name="moeverify-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_writer)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)
