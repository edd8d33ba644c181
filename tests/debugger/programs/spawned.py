"""A target function for spawned processes."""

import multiprocessing_pdb


def fail(culprit):
    """Install the hook, then raise."""
    multiprocessing_pdb.install()
    raise ValueError(f"from {culprit}")


def fail_numbered(number, culprit):
    """Raise with the signature of torch.multiprocessing: the process's number comes first."""
    fail(culprit)
