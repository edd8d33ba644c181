"""Choice of the collective backend of a job and of the GPU of a rank. Does not import torch."""

from __future__ import annotations

from moeverify.verification.launch.plan import Backend, Carrier, Device


def choose_backend(wanted: Backend, device: Device, *, num_ranks: int, num_gpus: int) -> Carrier:
    """Return the backend for tensors on `device` when all ranks of the job run on this machine.

    NCCL refuses two ranks on one GPU. Ranks that share a GPU use gloo, which copies through the CPU.
    """
    if device == "cpu":
        return "gloo"
    if wanted == "auto":
        return "nccl" if num_ranks <= num_gpus else "gloo"
    return wanted


def choose_external(wanted: Backend) -> Backend:
    """Return the backend for ranks started by an external launcher, possibly on several machines.

    Assumes that each rank has its own GPU.
    """
    return "nccl" if wanted == "auto" else wanted


def choose_gpu(local_rank: int, num_gpus: int) -> int:
    """Return the GPU index of a rank. Ranks share GPUs if there are more ranks than GPUs."""
    return local_rank % num_gpus
