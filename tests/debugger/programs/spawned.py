"""A target for spawned processes."""

import multiprocessing_pdb


def fail(culprit):
    """Install, then raise."""
    multiprocessing_pdb.install()
    raise ValueError(f"from {culprit}")


def fail_numbered(number, culprit):
    """As torch.multiprocessing calls it, with the process's number first."""
    fail(culprit)
