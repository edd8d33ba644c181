"""What runs in every rank of a launch of ours: the jobs of its plan, one after another."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.rendezvous import rendezvous

from moeverify.launch.plan import Job, Plan, write_atomically
from moeverify.launch.runner import JobRunner, RankContext, RunJob
from moeverify.results.failure import End, RankEnd
from moeverify.results.run import RankReport

__all__ = ["RankContext", "RunJob", "serve"]

_EXIT_RAISED = 1
_EXIT_HUNG = 3
_PEER_GRACE = 5.0
_NO_LIMIT = timedelta(days=365)


def serve(plan_path: Path | str, run_job: RunJob) -> None:
    """Run the jobs of a plan in this rank; what an entry calls with its first argument in every rank.

    `run_job` is called on the ranks below the job's `num_ranks`, with its default group built; rank 0's dict
    (JSON data) becomes the job's result. A rank whose job raises, or is over its time, writes its report and
    ends with status 1 or 3: the launch ends there, and the controller goes on with a new one.
    """
    plan = Plan.read(Path(plan_path))
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
    )
    reporter.runner = runner
    (plan.launch_folder / f"rank-{rank}.up").touch()
    gc.freeze()  # The imports stay for good: collecting after a job need not look at them.
    with runner.trace:
        for position, job in enumerate(plan.jobs):
            done = f"done/{position}"
            if rank >= job.num_ranks:
                # The launch ends if the job does not: there is no limit to set here.
                store.wait([done], _NO_LIMIT)
                continue
            runner.await_ranks(job.num_ranks, _NO_LIMIT)  # The controller has one.
            folder = plan.job_folder(position)
            reporter.begin(job, folder)
            result = runner.run(position, job, folder, run_job)
            if rank == 0:
                content = {"result": result, "seconds": time.monotonic() - reporter.began}
                write_atomically(folder / "result.json", json.dumps(content))
                store.set(done, "1")
            else:
                # The next job may end this launch: not before the result of this one is on disk.
                store.wait([done], _NO_LIMIT)
        runner.close()


class _Reporter:
    """Writes this rank's report when its job fails, and ends the rank."""

    runner: JobRunner

    def __init__(self, rank: int) -> None:
        self.began = 0.0
        self._rank = rank
        self._hung = False

    def begin(self, job: Job, folder: Path) -> None:
        """Note which job this rank is in."""
        self._job = job
        self._folder = folder
        self.began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{self._rank}.started").touch()

    def report_error(self, error: BaseException) -> None:
        """Report an exception and end this rank."""
        if self._hung:
            time.sleep(60.0)  # The watchdog's thread is about to end this rank.
        self.runner.failure_reporter.ignore_terminate()
        self._write(self.runner.failure_reporter.describe_error(error))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # No clean exit: what destroys a broken group may wait for peers that never answer.
        os._exit(_EXIT_RAISED)

    def report_hang(self) -> None:
        """Report that the job is over its time and end this rank."""
        self._hung = True
        # The peers' ends will break the collective that this rank waits in now.
        self.runner.trace.seal()
        self.runner.failure_reporter.disarm()
        end = RankEnd(how=End.OVER_TIME, timeout=self._job.timeout)
        self._write(self.runner.failure_reporter.describe_state(end))
        # The first exit makes elastic stop the others: they get a moment to report too.
        grace = time.monotonic() + _PEER_GRACE
        peers = [self._folder / f"rank-{rank}.json" for rank in range(self._job.num_ranks)]
        while time.monotonic() < grace and not all(path.exists() for path in peers):
            time.sleep(0.02)
        os._exit(_EXIT_HUNG)

    def _write(self, report: RankReport) -> None:
        write_atomically(self._folder / f"rank-{self._rank}.json", report.model_dump_json())
