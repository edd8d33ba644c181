"""What runs on the ranks of `moeverify doctor`: one probe a job.

Run as `python -m moeverify.worker.probes.main PLAN` by the launcher, in every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from moeverify.launch.plan import Job
from moeverify.launch.rank import serve
from moeverify.launch.runner import RankContext
from moeverify.results.probe import Answer
from moeverify.worker.probes import collectives
from moeverify.worker.probes import torch as parts

PROBES: Mapping[str, Callable[[RankContext], Answer]] = {
    "collectives": collectives.probe_sums,
    "reduce_scatter AVG": collectives.probe_average,
    "uneven all_to_all": collectives.probe_all_to_all,
    "strided all_reduce": collectives.probe_strided,
    "gradient layouts": collectives.probe_layouts,
    "reduce_scatter layouts": collectives.probe_scatter_layouts,
    "all_gather backward": collectives.probe_gather_backward,
    "PREMUL_SUM": collectives.probe_premultiplied,
    "FSDP2 divide factor": parts.probe_divide_factor,
    "grouped_mm": parts.probe_grouped_mm,
    "grouped_mm on CUDA": parts.probe_grouped_mm,
    "fused SGD on DTensor": parts.probe_fused_sgd,
    "triton": parts.probe_triton,
    "megablocks": parts.probe_megablocks,
    "GPU": parts.probe_gpu,
    "GPU peer access": parts.probe_peers,
    "NCCL version": parts.probe_nccl,
}


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    """Run one probe; rank 0 returns the row."""
    probe = PROBES[job.name.removeprefix("gloo ").removeprefix("nccl ")]
    answer = probe(context)
    return asdict(answer) if context.rank == 0 else None


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
