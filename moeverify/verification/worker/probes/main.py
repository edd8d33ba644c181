"""Worker of `moeverify doctor`: runs one probe per job.

The launcher runs `python -m moeverify.verification.worker.probes.main PLAN` in every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from moeverify.results.probe import Answer, Probe
from moeverify.verification.jobs import ProbeJob, ProbeResult, read_job, write_result
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext
from moeverify.verification.worker.probes import collectives
from moeverify.verification.worker.probes import torch as parts

PROBES: Mapping[str, Callable[[RankContext], Answer]] = {
    Probe.SUMS: collectives.probe_sums,
    Probe.AVERAGE: collectives.probe_average,
    Probe.ALL_TO_ALL: collectives.probe_all_to_all,
    Probe.STRIDED: collectives.probe_strided,
    Probe.LAYOUTS: collectives.probe_layouts,
    Probe.SCATTER_LAYOUTS: collectives.probe_scatter_layouts,
    Probe.GATHER_BACKWARD: collectives.probe_gather_backward,
    Probe.PREMULTIPLIED: collectives.probe_premultiplied,
    Probe.DIVIDE_FACTOR: parts.probe_divide_factor,
    Probe.GROUPED_MM: parts.probe_grouped_mm,
    Probe.FUSED_SGD: parts.probe_fused_sgd,
    Probe.TRITON: parts.probe_triton,
    Probe.MEGABLOCKS: parts.probe_megablocks,
    Probe.GPU: parts.probe_gpu,
    Probe.PEER_ACCESS: parts.probe_peers,
    Probe.NCCL: parts.probe_nccl,
}


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Run one probe. Rank 0 returns its answer."""
    return run_probe(context, job, PROBES)


def run_probe(
    context: RankContext, job: Job, probes: Mapping[str, Callable[[RankContext], Answer]]
) -> dict[str, Any] | None:
    """Run the probe that a job names, out of `probes`. Rank 0 returns its answer."""
    asked = read_job(job.payload)
    assert isinstance(asked, ProbeJob)
    answer = probes[asked.probe](context)
    return write_result(ProbeResult(answer=answer) if context.rank == 0 else None)


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
