"""The services that figures can be given to. A service is a line here and a file of its name with `log`.

`log(figures, commit, folder)` writes into a folder, without any network.
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
    """A service, by the name of its package."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


def check_tracker(tracker: Tracker) -> None:
    """Make sure that the package of a service is installed, before the work.

    Raises: MachineError where it is not.
    """
    if find_spec(tracker.value) is None:
        raise MachineError(
            f"--track {tracker} needs the package {tracker}; `pip install 'moeverify[{tracker}]'` installs it"
        )


def log_figures(tracker: Tracker, figures: Figures, commit: Commit, folder: Path) -> None:
    """Give the figures of a commit to a service, which writes them below a folder.

    Raises: OSError where the disk refuses.
    """
    import_module(f"moeverify.report.trackers.{tracker.value}").log(figures, commit, folder)
