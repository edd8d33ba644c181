"""Temporary folders of one command. The next command removes the folders of a killed one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeverify.stale_folders import LOCK, hold, remove_abandoned

PREFIX = "moeverify-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new temporary folder and remove it afterwards."""
    remove_abandoned(path.parent for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, hold(Path(name)):
        yield Path(name)
