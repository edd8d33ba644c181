"""The rank's side of a launch: runs the jobs of the plan one after another."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.rendezvous import rendezvous

from moeverify.results.failure import EndKind, RankEnd
from moeverify.results.run import RankReport
from moeverify.verification.launch.clock import PublishedClock
from moeverify.verification.launch.plan import CLOCK_FILE, USED_UP_FILE, Job, LaunchPlan, write_atomically
from moeverify.verification.launch.runner import JobRunner, RankContext, RunJob, collect_less

__all__ = ["RankContext", "RunJob", "serve"]

_EXIT_RAISED = 1
_EXIT_HUNG = 3
_PEER_GRACE = 5.0
_LAST = "last"
_NO_LIMIT = timedelta(days=365)


def serve(plan_path: Path | str, run_job: RunJob) -> None:
    """Run the jobs of a plan in this rank. Every entry calls this with its first command-line argument.

    It creates the default process group and calls `run_job` on the ranks below the job's `num_ranks`. The
    dict (JSON data) that rank 0 returns is the result of the job. A rank whose job raises or times out writes
    its report and exits with status 1 or 3. That ends the launch, and the controller continues with a new
    one, as it does when a job retires its ranks.
    """
    plan = LaunchPlan.read(Path(plan_path))
    store, rank, _ = next(rendezvous("env://"))
    reporter = _Reporter(rank)
    runner = JobRunner(
        store,
        rank,
        int(os.environ.get("LOCAL_RANK", rank)),
        plan.device,
        plan.backend,
        plan.launch_folder,
        on_raise=reporter.report_error,
        on_hang=reporter.report_hang,
        clock=PublishedClock(plan.launch_folder / CLOCK_FILE).read,
    )
    reporter.runner = runner
    (plan.launch_folder / f"rank-{rank}.up").touch()
    collect_less(plan.device)
    with runner.trace:
        for position, job in enumerate(plan.jobs):
            done = f"done/{position}"
            if rank >= job.num_ranks:
                # No timeout is needed here: if the job fails, the launch ends.
                store.wait([done], _NO_LIMIT)
                if store.get(done).decode() == _LAST:
                    break
                continue
            runner.await_ranks(job.num_ranks, math.inf)  # The controller enforces the limit.
            folder = plan.job_folder(position)
            reporter.begin(job, folder)
            result = runner.run(position, job, folder, run_job)
            if rank == 0:
                content = {"result": result, "seconds": time.monotonic() - reporter.began}
                if runner.is_used_up:
                    (plan.launch_folder / USED_UP_FILE).touch()
                write_atomically(folder / "result.json", json.dumps(content))
                store.set(done, _LAST if runner.is_used_up else "1")
            else:
                # The next job may end this launch, so wait until this result is on disk.
                store.wait([done], _NO_LIMIT)
            if runner.is_used_up:
                break
        runner.close()


class _Reporter:
    """Writes the report of this rank when its job fails, and exits."""

    runner: JobRunner

    def __init__(self, rank: int) -> None:
        self.began = 0.0
        self._rank = rank
        self._hung = False

    def begin(self, job: Job, folder: Path) -> None:
        """Record the current job and mark it as started."""
        self._job = job
        self._folder = folder
        self.began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{self._rank}.started").touch()

    def report_error(self, error: BaseException) -> None:
        """Report an exception and exit with status 1."""
        if self._hung:
            time.sleep(60.0)  # The watchdog's thread is about to end this process.
        self.runner.failure_reporter.ignore_terminate()
        self._write(self.runner.failure_reporter.describe_error(error))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Skip the teardown: destroying a broken group may wait for peers that never answer.
        os._exit(_EXIT_RAISED)

    def report_hang(self) -> None:
        """Report a timeout and exit with status 3."""
        self._hung = True
        # The end of a peer will break the collective that this rank is in, so stop recording now.
        self.runner.trace.seal()
        self.runner.failure_reporter.disarm()
        end = RankEnd(how=EndKind.OVER_TIME, timeout=self._job.timeout)
        self._write(self.runner.failure_reporter.describe_state(end))
        # The first exit makes elastic stop the other ranks. Wait for their reports first.
        grace = self.runner.clock() + _PEER_GRACE
        peers = [self._folder / f"rank-{rank}.json" for rank in range(self._job.num_ranks)]
        while self.runner.clock() < grace and not all(path.exists() for path in peers):
            time.sleep(0.02)
        os._exit(_EXIT_HUNG)

    def _write(self, report: RankReport) -> None:
        write_atomically(self._folder / f"rank-{self._rank}.json", report.model_dump_json())
