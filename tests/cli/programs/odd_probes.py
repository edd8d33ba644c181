"""An entry for `moeverify doctor` whose probes end in every possible way."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moeverify.results.probe import Answer, Probe, ProbeOutcome
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext
from moeverify.verification.worker.probes import collectives as probed_collectives
from moeverify.verification.worker.probes.main import run_probe


def crash(context: RankContext) -> Answer:
    if context.rank == 1:
        os.abort()
    dist.barrier()
    return Answer(outcome=ProbeOutcome.RIGHT)


def hang(context: RankContext) -> Answer:
    if context.rank == 1:
        time.sleep(600)
    dist.barrier()
    return Answer(outcome=ProbeOutcome.RIGHT)


def be_late(context: RankContext) -> Answer:
    """Hang on the first call only, like a probe that other probes have delayed."""
    first = Path(os.environ["FIRST_TRY"])
    if context.rank == 0 and not first.exists():
        first.touch()
        time.sleep(600)
    dist.barrier()
    return Answer(outcome=ProbeOutcome.RIGHT)


def fail(context: RankContext) -> Answer:
    raise KeyError("no such thing")


def average_by_sum(context: RankContext) -> Answer:
    """Let reduce_scatter sum where it should average, as an older gloo did."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter = getattr(dist, name)
    setattr(dist, name, lambda part, mine, op: scatter(part, mine, op=dist.ReduceOp.SUM))
    try:
        return probed_collectives.probe_average(context)
    finally:
        setattr(dist, name, scatter)


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    probes = {
        "crash": crash,
        "hang": hang,
        "fail": fail,
        Probe.STRIDED: be_late,
        Probe.AVERAGE: average_by_sum,
    }
    return run_probe(context, job, probes)


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
