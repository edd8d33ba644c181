"""Services that track the numbers of runs over commits; all of them are optional.

A service is a member of `Tracker` and a function `(figures, commit, folder)`, which writes into a folder
and uses no network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING

from moeverify.errors import MachineError

if TYPE_CHECKING:
    from pathlib import Path

    from moeverify.report.figures import Figures, TrackedCommit

_EXPERIMENT = "moeverify"


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


def _log_tensorboard(figures: Figures, commit: TrackedCommit, folder: Path) -> None:
    """Write the figures as scalars, with the commit's number and time.

    TensorBoard: one event file per run; view with `tensorboard --logdir DIR`.
    """
    from tensorboard.summary import Writer

    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(str(folder))
    try:
        for name, value in figures.numbers.items():
            writer.add_scalar(name, value, commit.number, wall_time=commit.time)
    finally:
        writer.close()


def _log_wandb(figures: Figures, commit: TrackedCommit, folder: Path) -> None:
    """Write the figures at the commit's number; the environment becomes the run's configuration.

    Weights & Biases, offline: one folder per run; upload with `wandb sync DIR/wandb/offline-*`.
    """
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        mode="offline",
        dir=str(folder),
        project="moeverify",
        name=commit.name[:12] or None,
        config={**figures.tags, "commit": commit.name},
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    run.log(figures.numbers, step=commit.number)
    run.summary["verdict"] = figures.verdict
    run.finish()
    wandb.teardown()  # finish may return before the file is complete


def _log_mlflow(figures: Figures, commit: TrackedCommit, folder: Path) -> None:
    """Write the figures as metrics of a run, with the commit's number and time.

    MLflow with a local SQLite file; view with `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db`.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    known = client.get_experiment_by_name(_EXPERIMENT)
    experiment = known.experiment_id if known is not None else client.create_experiment(_EXPERIMENT)
    run = client.create_run(experiment, run_name=commit.name[:12] or None)
    milliseconds = int(commit.time * 1000)
    metrics = [Metric(name, value, milliseconds, commit.number) for name, value in figures.numbers.items()]
    parameters = [Param(name, value) for name, value in figures.tags.items()]
    tags = [RunTag("commit", commit.name), RunTag("verdict", figures.verdict)]
    for start in range(0, len(metrics), 1000):  # the largest batch that one call accepts
        client.log_batch(run.info.run_id, metrics=metrics[start : start + 1000])
    client.log_batch(run.info.run_id, params=parameters, tags=tags)
    client.set_terminated(run.info.run_id)


_SERVICES: Mapping[Tracker, Callable[[Figures, TrackedCommit, Path], None]] = {
    Tracker.tensorboard: _log_tensorboard,
    Tracker.wandb: _log_wandb,
    Tracker.mlflow: _log_mlflow,
}


def log_figures(tracker: Tracker, figures: Figures, commit: TrackedCommit, folder: Path) -> None:
    """Write the figures of a commit for a service, below a folder.

    Raises: OSError when writing fails.
    """
    _SERVICES[tracker](figures, commit, folder)
