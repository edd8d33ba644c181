"""Environment variables that frameworks read and write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_environment(**values: str) -> Iterator[None]:
    """Set environment variables inside the block, and undo all changes of the environment after it."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
