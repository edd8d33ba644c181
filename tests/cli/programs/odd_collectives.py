"""Wrong collectives for `moeverify comm`, in jobs called odd: a reversed exchange, a gather without a sum."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from moeverify.results.collective_name import CollectiveName
from moeverify.results.collective_run import RankTransfer, Transfer
from moeverify.verification.launch.plan import Job
from moeverify.verification.launch.rank import serve
from moeverify.verification.launch.runner import RankContext
from moeverify.verification.worker.collective import COLLECTIVES, run_collective


def exchange_in_wrong_order(x: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    return COLLECTIVES[CollectiveName.ALL_TO_ALL][0](x, transfer, mine).flip(0)


def take_slice(grad: Tensor, transfer: Transfer, mine: RankTransfer) -> Tensor:
    """Return this rank's slice of the gradient. Wrong here: the ranks' gradients differ and need a sum."""
    return grad.split([sum(rank.sends) for rank in transfer.ranks])[mine.rank]


def run_job(context: RankContext, job: Job) -> dict[str, Any] | None:
    odd = {
        CollectiveName.ALL_TO_ALL: (exchange_in_wrong_order, COLLECTIVES[CollectiveName.ALL_TO_ALL][1]),
        CollectiveName.ALL_GATHER: (COLLECTIVES[CollectiveName.ALL_GATHER][0], take_slice),
    }
    return run_collective(context, job, {**COLLECTIVES, **odd} if job.name.startswith("odd") else COLLECTIVES)


if __name__ == "__main__":
    serve(sys.argv[1], run_job)
