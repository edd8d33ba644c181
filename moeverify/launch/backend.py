"""Which backend the collectives of a job take, and which GPU a rank computes on. No torch."""

from __future__ import annotations

from typing import Literal

from moeverify.launch.plan import Backend, Device


def choose_backend(wanted: Backend, device: Device) -> Literal["gloo", "nccl"]:
    """Return the backend for tensors on the device of a job whose ranks are all on this machine.

    NCCL refuses two ranks on one GPU. Gloo, which copies through the CPU, lets them share it, and has to be asked
    for: it was not yet seen to carry every layout on GPUs.
    """
    if device == "cpu":
        return "gloo"
    return "nccl" if wanted == "auto" else wanted


def choose_gpu(local_rank: int, num_gpus: int) -> int:
    """Return the GPU of a rank, which it shares where there are more ranks than GPUs."""
    return local_rank % num_gpus
