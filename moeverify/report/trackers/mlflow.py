"""MLflow with a local SQLite file; view with `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db`."""

from __future__ import annotations

from pathlib import Path

from moeverify.report.trackers.figures import Commit, Figures

EXPERIMENT = "moeverify"


def log(figures: Figures, commit: Commit, folder: Path) -> None:
    """Write the figures as metrics of a run, with the commit's number and time."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    known = client.get_experiment_by_name(EXPERIMENT)
    experiment = known.experiment_id if known is not None else client.create_experiment(EXPERIMENT)
    run = client.create_run(experiment, run_name=commit.name[:12] or None)
    milliseconds = int(commit.time * 1000)
    metrics = [Metric(name, value, milliseconds, commit.number) for name, value in figures.numbers.items()]
    parameters = [Param(name, value) for name, value in figures.tags.items()]
    tags = [RunTag("commit", commit.name), RunTag("verdict", figures.verdict)]
    for start in range(0, len(metrics), 1000):  # the largest batch that one call accepts
        client.log_batch(run.info.run_id, metrics=metrics[start : start + 1000])
    client.log_batch(run.info.run_id, params=parameters, tags=tags)
    client.set_terminated(run.info.run_id)
