"""Which backend the collectives of a job take, and which GPU a rank computes on. No torch."""

from __future__ import annotations

from moeverify.launch.plan import Backend, Carrier, Device


def choose_backend(wanted: Backend, device: Device, *, num_ranks: int, num_gpus: int) -> Carrier:
    """Return the backend for tensors on the device of a job whose ranks are all on this machine.

    NCCL refuses two ranks on one GPU, so ranks that share one take gloo, which copies through the CPU.
    """
    if device == "cpu":
        return "gloo"
    if wanted == "auto":
        return "nccl" if num_ranks <= num_gpus else "gloo"
    return wanted


def choose_external(wanted: Backend) -> Backend:
    """Return the backend that is asked for of ranks that another launcher started, maybe on several machines.

    There each is taken to have a GPU of its own.
    """
    return "nccl" if wanted == "auto" else wanted


def choose_gpu(local_rank: int, num_gpus: int) -> int:
    """Return the GPU of a rank, which it shares where there are more ranks than GPUs."""
    return local_rank % num_gpus
