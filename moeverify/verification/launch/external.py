"""Jobs on ranks that torchrun, srun or a user's script started.

Every rank iterates over `serve_external`. Rank 0 receives the outcomes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from moeverify.results.failure import EndKind, FailureCause, JobFailure, RankEnd
from moeverify.results.run import RankReport
from moeverify.results.trace import CollectiveRecord
from moeverify.verification.collectives.flight_recorder import NUM_SLOTS
from moeverify.verification.launch.clock import ActiveClock, ThreadUsage, Usage
from moeverify.verification.launch.evidence import read_tail
from moeverify.verification.launch.failure_reporter import SIGNALS_THREAD
from moeverify.verification.launch.failure_root_cause import find_root_cause
from moeverify.verification.launch.plan import Backend, Device, Job, JobOutcome, LaunchEvent, job_folder
from moeverify.verification.launch.runner import JobRunner, RunJob, collect_less
from moeverify.verification.launch.world import ExternalWorld, complete_environment, set_interpreter

EXIT_FAILED = 3
_COLLECT_LIMIT = 5.0
_ANSWER_LIMIT = 15.0
_READY_LIMIT = 15.0
_UP_LIMIT = 300.0  # torch's default for the rendezvous
_POLL = 0.05
_PER_SECOND = 1000  # the store counts whole numbers
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Name of the job in which ranks of this launcher were lost, if any. No further job runs in this process.
_LOST_IN: list[str] = []

OnEvent = Callable[[LaunchEvent], None]

# Stores kept until the process ends: a peer may have reconnected to the server behind one.
_STORES: list[Any] = []


def serve_external(
    jobs: Sequence[Job],
    folder: Path,
    entry: str,
    *,
    device: Device = "cpu",
    backend: Backend = "nccl",
    on_event: OnEvent = lambda event: None,
) -> Generator[JobOutcome]:
    """Run the jobs in this rank and its peers; yield the outcome of every job, in order, on rank 0.

    `entry` is a module with a function `run_job`. It is imported here, after the environment variables it
    reads are set. Every rank must pass the same jobs. The jobs run in a separate thread, because a rank
    never returns from a collective with a lost peer. This thread keeps running and writes the reports.

    Ranks of an external launcher cannot be restarted. When a job fails or hangs, rank 0 yields its outcome
    and yields all later jobs as `unstarted`. The process of rank 0 exits with status 3 when the caller lets
    it end; every other rank exits with that status immediately. A job that needs more ranks than exist is
    `unstarted`, and the other jobs still run.

    On rank 0, `on_event` receives the `start` events of jobs and their `report` events. Collective: all
    ranks.

    Raises: RuntimeError when no launcher has set its environment variables.
    """
    world = complete_environment()
    set_interpreter(device)
    if world is None:
        raise RuntimeError("this process is no rank: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are unset")
    run_job: RunJob = importlib.import_module(entry).run_job
    if _LOST_IN:
        for index, job in enumerate(jobs):
            yield _leave_unstarted(job, index, _LOST_IN[0])
        return
    session = _Session(world, jobs, Path(folder).resolve(), device, backend)
    # `atexit` runs handlers in reverse order: later ones, such as those of experiment trackers, run first.
    atexit.register(session.end_process)
    with session.watch_signals():
        yield from session.run(run_job, on_event)


def share_from_first(text: str) -> str:
    """Return the `text` of rank 0 on every rank and ignore the `text` of the others.

    Rank 0 waits until all ranks have read it, since its process may host the store. Collective: all ranks
    of the launcher.

    Raises: RuntimeError when no launcher has set its environment variables.
    """
    world = complete_environment()
    if world is None:
        raise RuntimeError("this process is no rank: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are unset")
    found, _, _ = next(rendezvous("env://"))
    _STORES.append(found)
    # The store of torchrun outlives the ranks and still holds the values of an earlier start.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"moeverify-shared-{start}", found)
    if world.rank == 0:
        store.set("text", text)
    shared = store.get("text").decode()
    if store.add("read", 1) == world.world_size:
        store.set("all-read", "1")
    if world.rank == 0:
        store.wait(["all-read"], timedelta(minutes=5))
    return shared


class _Session:
    """All jobs of this rank, and the handling of a failure on any rank.

    The mailbox is a second connection to the store, because a connection is locked while it waits. A
    failing rank r writes its report to `I/report/r` and then sets `I/failed`, where I is the index of the
    job. Every other rank sees the flag and writes its report too. Rank 0 collects the reports.
    """

    def __init__(
        self, world: ExternalWorld, jobs: Sequence[Job], folder: Path, device: Device, backend: Backend
    ) -> None:
        self._world = world
        self._jobs = jobs
        self._folder = folder
        self._device: Device = device
        self._backend: Backend = backend
        self._index = 0
        self._began = time.monotonic()
        self._failing = threading.Lock()
        self._is_over = False
        # Messages to the iterating thread. None ends the iteration; an exception is the one that ended the
        # jobs' thread.
        self._news: queue.SimpleQueue[LaunchEvent | JobOutcome | BaseException | None] = queue.SimpleQueue()
        store, _, _ = next(rendezvous("env://"))
        mailbox, _, _ = next(rendezvous("env://"))
        self._store = PrefixStore("moeverify", store)
        self._mailbox = PrefixStore("moeverify-mail", mailbox)
        self._own_folder = folder / "launch-1"
        self._own_folder.mkdir(parents=True, exist_ok=True)
        self._ready = threading.Event()
        self._runner: JobRunner
        self._clock: ActiveClock
        self._not_counted = 0.0  # time that the clock had not counted when the job began

    def run(self, run_job: RunJob, on_event: OnEvent) -> Generator[JobOutcome]:
        """Run all jobs in a thread and yield their outcomes as they arrive.

        Raises: the error that ended the thread, if one did.
        """
        thread = threading.Thread(target=self._serve, args=(run_job,), name="moeverify-jobs", daemon=True)
        thread.start()
        while (news := self._news.get()) is not None:
            if isinstance(news, BaseException):
                raise news
            if isinstance(news, LaunchEvent):
                on_event(news)
            else:
                yield news
        if not self._failing.locked():
            thread.join()
            self._is_over = True

    def end_process(self) -> None:
        """Exit immediately if ranks were lost or if the caller did not wait for the jobs.

        The jobs' thread may be stuck in a collective, and the destructors of torch's process groups would
        wait for it.
        """
        if not self._is_over:
            _flush()
            os._exit(EXIT_FAILED)

    @contextlib.contextmanager
    def watch_signals(self) -> Generator[None]:
        """Make SIGTERM and SIGINT end the running job, with a report of this rank.

        A separate thread receives the signals: Python runs its handlers in the main thread, which may be
        inside C code.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def watch() -> None:
            while byte := os.read(reader, 1):
                if byte[0] in _SIGNALS:
                    self._fail_by_signal(byte[0])

        thread = threading.Thread(target=watch, name=SIGNALS_THREAD, daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_writer)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            if self._failing.locked():
                # The launcher terminates all ranks when one is lost, and this rank still has to write the
                # reports.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.close(writer)
            if not self._failing.locked():
                thread.join()
                os.close(reader)

    def _serve(self, run_job: RunJob) -> None:
        """Run all jobs in this thread. All thread-local state, such as the current GPU, must be set here."""
        try:
            self._clock = ActiveClock(self._make_measure())
            self._runner = JobRunner(
                self._store,
                self._world.rank,
                self._world.local_rank,
                self._device,
                self._backend,
                self._own_folder,
                on_raise=self._fail_by_error,
                on_hang=self._fail_by_hang,
                on_tick=self._look_for_failure,
                on_report=self._pass_on_report,
                catch_terminate=False,
                clock=self._clock.read,
            )
            self._ready.set()
            collect_less(self._device)
            with self._runner.trace:
                for index, job in enumerate(self._jobs):
                    self._index = index
                    self._run_job(job, run_job)
                self._runner.close()
                self._leave()
        except BaseException as error:
            self._news.put(error)
        self._news.put(None)

    def _make_measure(self) -> Callable[[], Usage]:
        """Return the measurement for the clock of this rank: its own run time, and the waits of all ranks."""
        own = ThreadUsage(threading.get_native_id())
        total = self._mailbox.add("waited", 0)

        def measure() -> Usage:
            nonlocal total
            usage = own.measure()
            try:
                before, total = total, self._mailbox.add("waited", round(usage.waited * _PER_SECOND))
            except RuntimeError:  # the process that hosts the store is gone
                return usage
            return usage._replace(waited=(total - before) / _PER_SECOND)

        return measure

    def _run_job(self, job: Job, run_job: RunJob) -> None:
        self._began = time.monotonic()
        if job.num_ranks > self._world.world_size:
            num_started = self._world.world_size
            failure = JobFailure(
                cause=FailureCause.TOO_FEW, num_needed=job.num_ranks, num_started=num_started
            )
            self._report_outcome("unstarted", failure)
            return
        done = f"done/{self._index}"
        if self._world.rank >= job.num_ranks:
            self._store.wait([done], timedelta(days=365))
            return
        self._runner.await_ranks(job.num_ranks, _UP_LIMIT)
        self._not_counted = self._clock.not_counted
        folder = job_folder(self._folder, self._index)
        folder.mkdir(parents=True, exist_ok=True)
        self._pass_on(LaunchEvent(kind="start", job=job.name, num_ranks=job.num_ranks))
        result = self._runner.run(self._index, job, folder, run_job)
        if self._world.rank == 0:
            self._store.set(done, "1")
            self._report_outcome("done", None, result=result, seconds=time.monotonic() - self._began)

    def _pass_on_report(self, text: str) -> None:
        self._pass_on(LaunchEvent(kind="report", job=self._jobs[self._index].name, detail=text))

    def _pass_on(self, news: LaunchEvent | JobOutcome) -> None:
        if self._world.rank == 0:
            self._news.put(news)

    def _leave(self) -> None:
        """Keep every rank alive until all have finished, since one of them hosts the store."""
        if self._store.add("left", 1) == self._world.world_size:
            self._store.set("all-left", "1")
        self._store.wait(["all-left"], timedelta(seconds=60))

    def _report_outcome(self, state: Any, failure: JobFailure | None, **rest: Any) -> None:
        name = self._jobs[self._index].name
        self._pass_on(JobOutcome(job=name, index=self._index, state=state, failure=failure, launch=1, **rest))

    def _look_for_failure(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._mailbox.check([f"{self._index}/failed"]):
                self._fail(self._runner.failure_reporter.describe_state(RankEnd(how=EndKind.STOPPED)))

    def _fail_by_error(self, error: BaseException) -> None:
        self._fail(self._runner.failure_reporter.describe_error(error))

    def _fail_by_hang(self) -> None:
        end = RankEnd(how=EndKind.OVER_TIME, timeout=self._jobs[self._index].timeout)
        self._fail(self._runner.failure_reporter.describe_state(end), patience=_POLL * 10)

    def _fail_by_signal(self, number: int) -> None:
        self._ready.wait(_READY_LIMIT)
        end = RankEnd(how=EndKind.SIGNALLED, signal=number)
        self._fail(self._runner.failure_reporter.describe_state(end))

    def _fail(self, report: RankReport, patience: float = 0.0) -> NoReturn:
        """Send this rank's report, make sure that rank 0 has all outcomes, and never return.

        The processes of all ranks but rank 0 exit. `patience` in seconds gives the peers, whose clocks
        started a moment later, time to notice the timeout themselves.
        """
        if not self._failing.acquire(blocking=False):
            _sleep_for_ever()  # Another thread of this rank handles the failure and ends the process.
        self._runner.failure_reporter.disarm()
        try:
            self._report(report, patience)
        finally:
            if self._world.rank != 0:
                _flush()
                os._exit(EXIT_FAILED)
            self._news.put(None)
        _sleep_for_ever()

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
        time.sleep(_POLL * 4)  # This process may host the store, which the peers still read.

    def _collect_failure(self) -> None:
        """Collect the reports that arrive in time, and pass on the outcomes of this and all later jobs."""
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
                reports.append(RankReport.of(rank, RankEnd(how=EndKind.SILENT), stack=stack))
                continue
            content = json.loads(self._mailbox.get(key))
            reports.append(RankReport.model_validate(content["report"]))
            times[rank] = content["time"]
            traces[rank] = [CollectiveRecord.model_validate(record) for record in content["records"]]
        root_cause = find_root_cause(reports, times, traces)
        failure = root_cause.make_failure()
        if root_cause.is_hang:
            failure = root_cause.make_failure(
                FailureCause.OVER_TIME,
                timeout=self._jobs[self._index].timeout,
                machine=self._clock.describe_machine(self._not_counted),
            )
        failed = self._jobs[self._index].name
        seconds = time.monotonic() - self._began
        self._report_outcome(
            "hung" if root_cause.is_hang else "failed",
            failure,
            rank_reports=root_cause.reports,
            seconds=seconds,
        )
        _LOST_IN.append(failed)
        for index in range(self._index + 1, len(self._jobs)):
            self._pass_on(_leave_unstarted(self._jobs[index], index, failed))

    def _wait_for(self, keys: list[str], limit: float) -> None:
        self._clock.sleep(limit, until=lambda: self._mailbox.check(keys))


def _leave_unstarted(job: Job, index: int, failed: str) -> JobOutcome:
    failure = JobFailure(cause=FailureCause.ENDED_BEFORE, earlier_job=failed)
    return JobOutcome(job=job.name, index=index, state="unstarted", failure=failure, launch=1)


def _flush() -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600.0)
