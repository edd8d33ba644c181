"""Which backend the collectives of a job take, and which GPU a rank computes on. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.launch.plan import Backend, Device


def choose_backend(
    wanted: Backend, device: Device, *, num_ranks: int, num_gpus: int
) -> Literal["gloo", "nccl"]:
    """Return the backend for tensors on the device of a job whose ranks are all on this machine.

    NCCL refuses two ranks on one GPU, so ranks that share one take gloo, which copies through the CPU.
    """
    if device == "cpu":
        return "gloo"
    if wanted == "auto":
        return "nccl" if num_ranks <= num_gpus else "gloo"
    return wanted


def choose_gpu(local_rank: int, num_gpus: int) -> int:
    """Return the GPU of a rank, which it shares where there are more ranks than GPUs."""
    return local_rank % num_gpus
