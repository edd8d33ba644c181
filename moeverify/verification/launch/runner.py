"""Execution of one job in a rank: default process group, work, teardown, and timeout."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from moeverify.verification.collectives.staging import stage_collectives
from moeverify.verification.collectives.trace import CollectiveTrace
from moeverify.verification.launch.backend import choose_backend, choose_gpu
from moeverify.verification.launch.caches import MeshCaches
from moeverify.verification.launch.failure_reporter import FailureReporter
from moeverify.verification.launch.plan import Backend, Device, Job
from moeverify.verification.launch.watchdog import Watchdog

_UP_POLL = timedelta(seconds=10)
# Timeout of process groups. The watchdog, whose clock may be slower, ends a job much earlier with a report.
_GROUP_LIMIT = timedelta(days=7)

_FEW_COLLECTIONS = 20_000


def collect_less(device: Device) -> None:
    """Exclude the imports of this rank from garbage collection, and on the CPU collect less often.

    The imports live until the process ends. A job creates many small objects that live until it ends. The
    default threshold searches them for cycles so often that this takes a tenth of the job. On a GPU the
    default remains, since a cycle may keep memory of the device.
    """
    gc.freeze()
    if device == "cpu":
        gc.set_threshold(_FEW_COLLECTIONS)


@dataclass(frozen=True)
class RankContext:
    """Context of one rank in a job, valid while the job's default process group exists.

    `store` and `folder` belong to the job. `trace` holds the collectives of this rank since the start of
    the job. `report(text)` on rank 0 sends a `report` event to the controller; on other ranks it has no
    effect. `admit(meshes)` is for jobs with `keeps_meshes`; see `MeshCaches`. `extend()` adds the `grace`
    of the job to the time of this rank. `retire()` makes this job the last one of the launch, if a new launch
    can follow. `clock` returns the time that limits count; see `ActiveClock`.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store
    folder: Path
    trace: CollectiveTrace
    report: Callable[[str], None]
    admit: Callable[[Iterable[DeviceMesh]], None]
    extend: Callable[[], None] = lambda: None
    retire: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic


RunJob = Callable[[RankContext, Job], dict[str, Any] | None]


class JobRunner:
    """Runner of consecutive jobs in this rank, over one store that outlives them.

    `on_raise` is called as soon as a job raises, before its groups are torn down and the peers notice.
    `on_hang` is called in another thread when a job times out. Neither needs to return. `folder` holds the
    files of the rank. With `catch_terminate`, SIGTERM dumps the stacks of all threads there. `on_report`
    receives the reports of rank 0. Without it they go to the file `events` in the folder of the job, which
    the controller reads. `clock` measures the time of jobs.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        local_rank: int,
        device: Device,
        backend: Backend,
        folder: Path,
        *,
        on_raise: Callable[[BaseException], None],
        on_hang: Callable[[], None],
        on_tick: Callable[[], None] | None = None,
        on_report: Callable[[str], None] | None = None,
        catch_terminate: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.rank = rank
        self.is_used_up = False  # a rank of the last job asked to retire
        self._store = store
        self._local_rank = local_rank
        self._wanted = backend
        self._num_gpus = torch.cuda.device_count() if device == "cuda" else 0
        self._device = torch.device("cpu")
        if device == "cuda":
            self._device = torch.device("cuda", choose_gpu(local_rank, self._num_gpus))
            torch.cuda.set_device(self._device)
        self._on_raise = on_raise
        self._on_report = on_report
        self._caches = MeshCaches(self._device)
        self.trace = CollectiveTrace(folder / f"rank-{rank}.flight")
        self.failure_reporter = FailureReporter(folder, rank, self.trace, catch_terminate)

        def tick(left: float | None) -> None:
            self.trace.poll()
            if left is not None:
                self.failure_reporter.follow(left)
            if on_tick is not None:
                on_tick()

        self._watchdog = Watchdog(on_hang, tick, clock)
        store.set(f"up/{rank}", "1")

    def await_ranks(self, num_ranks: int, limit: float) -> None:
        """Wait until the first `num_ranks` ranks are up. This time does not count towards the job.

        Units: `limit` in seconds of the clock.

        Raises: torch.distributed.DistStoreError when a rank is not up after `limit`.
        """
        end = self.clock() + limit
        while True:
            try:
                self._store.wait([f"up/{rank}" for rank in range(num_ranks)], _UP_POLL)
                return
            except dist.DistStoreError:
                if self.clock() >= end:
                    raise

    def run(self, index: int, job: Job, folder: Path, run_job: RunJob) -> dict[str, Any] | None:
        """Run one job until all of its ranks have finished, and return the result of `run_job`.

        Raises: any exception of `run_job`, after `on_raise` was called and all groups were destroyed.
        """
        store = PrefixStore(f"job/{index}", self._store)
        self.trace.reset()
        self.failure_reporter.arm(job.timeout)
        self._watchdog.arm(job.timeout)
        try:
            result = self._run_in_group(store, job, folder, run_job)
            if self.rank == 0:
                # Serialize here, so that a result that is not JSON counts as an error of the job.
                json.dumps(result)
        except BaseException as error:
            self._on_raise(error)
            raise
        finally:
            self._watchdog.disarm()
            self.failure_reporter.disarm()
        return result

    def close(self) -> None:
        """Stop the watchdog."""
        self._watchdog.stop()

    def _run_in_group(
        self, store: PrefixStore, job: Job, folder: Path, run_job: RunJob
    ) -> dict[str, Any] | None:
        kind: Device = "cuda" if self._device.type == "cuda" else "cpu"
        backend = choose_backend(self._wanted, kind, num_ranks=job.num_ranks, num_gpus=self._num_gpus)
        staging = stage_collectives() if kind == "cuda" and backend == "gloo" else None
        self._caches.begin(job.keeps_meshes)
        has_failed = True
        try:
            # No `device_id`: meshes would then split this group, and torch 2.11 crashes in a split after an
            # earlier default group of the process was destroyed.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
                store=PrefixStore("group", store),
                rank=self.rank,
                world_size=job.num_ranks,
                timeout=_GROUP_LIMIT,
            )
            context = RankContext(
                rank=self.rank,
                world_size=job.num_ranks,
                local_rank=self._local_rank,
                device=self._device,
                store=PrefixStore("user", store),
                folder=folder,
                trace=self.trace,
                report=self._make_report(folder),
                admit=self._caches.admit,
                extend=lambda: self._extend(job),
                retire=lambda: store.set("used up", "1"),
                clock=self.clock,
            )
            result = run_job(context, job)
            # A peer may still be connecting to the groups of this rank: gloo treats a closed peer as a
            # crash.
            if store.add("finished", 1) == job.num_ranks:
                store.set("all", "1")
            store.wait(["all"], _GROUP_LIMIT)
            self.is_used_up = store.check(["used up"])
            has_failed = False
            return result
        except BaseException as error:
            # Report before the teardown: the peers notice the teardown, and their reports must be newer
            # than this one.
            self._on_raise(error)
            raise
        finally:
            self._caches.end(has_failed)
            if dist.is_initialized():
                dist.destroy_process_group()
            self._caches.settle()
            if staging is not None:
                # The next job may have a GPU for each rank.
                staging._destroy()  # type: ignore[no-untyped-call]

    def _extend(self, job: Job) -> None:
        """Add the grace of the job to the remaining time of this rank."""
        if job.grace:
            self._watchdog.extend(job.grace)
            self.failure_reporter.follow(self._watchdog.left or 0.0)

    def _make_report(self, folder: Path) -> Callable[[str], None]:
        if self.rank != 0:
            return lambda text: None
        if self._on_report is not None:
            return self._on_report

        def report(text: str) -> None:
            with (folder / "events").open("a") as file:
                file.write(json.dumps(text) + "\n")

        return report
