"""TensorBoard: one event file per run; view with `tensorboard --logdir DIR`."""

from __future__ import annotations

from pathlib import Path

from moeverify.report.trackers.figures import Commit, Figures


def log(figures: Figures, commit: Commit, folder: Path) -> None:
    """Write the figures as scalars, with the commit's number and time."""
    from tensorboard.summary import Writer

    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(str(folder))
    try:
        for name, value in figures.numbers.items():
            writer.add_scalar(name, value, commit.number, wall_time=commit.time)
    finally:
        writer.close()
