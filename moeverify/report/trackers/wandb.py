"""Weights & Biases, offline: one folder per run; upload with `wandb sync DIR/wandb/offline-*`."""

from __future__ import annotations

from pathlib import Path

from moeverify.report.trackers.figures import Commit, Figures


def log(figures: Figures, commit: Commit, folder: Path) -> None:
    """Write the figures at the commit's number; the environment becomes the run's configuration."""
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
