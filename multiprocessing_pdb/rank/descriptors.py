"""Descriptors above 2: the program owns 0, 1 and 2, even if it has closed them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def above_standard_streams() -> Iterator[None]:
    """Make every descriptor opened inside the block greater than 2."""
    fillers = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)]
    try:
        while fillers[-1] <= 2:
            fillers.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        yield
    finally:
        for filler in fillers:
            os.close(filler)
