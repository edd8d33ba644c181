"""Registry of tracking services. A service is a line here and a module of its name with `log`.

`log(figures, commit, folder)` writes into a folder and uses no network.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from moeverify.errors import MachineError

if TYPE_CHECKING:
    from pathlib import Path

    from moeverify.report.trackers.figures import Commit, Figures


class Tracker(StrEnum):
    """A tracking service, named after its package."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


def check_tracker(tracker: Tracker) -> None:
    """Check, before a run, that the package of a service is installed.

    Raises: MachineError if it is not.
    """
    if find_spec(tracker.value) is None:
        raise MachineError(
            f"--track {tracker} needs the package {tracker}; `pip install 'moeverify[{tracker}]'` installs it"
        )


def log_figures(tracker: Tracker, figures: Figures, commit: Commit, folder: Path) -> None:
    """Write the figures of a commit for a service, below a folder.

    Raises: OSError when writing fails.
    """
    import_module(f"moeverify.report.trackers.{tracker.value}").log(figures, commit, folder)
