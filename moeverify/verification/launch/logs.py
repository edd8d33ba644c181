"""Log files of torch elastic: one file per rank and stream, in the folder of the launch."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class RankLogs(LogsSpecs):
    """Log specification: `rank-N.out` and `rank-N.err` in one folder, and nothing on the terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """Return the folder of the launch."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the log files of each local rank, and set the error file in the environment of each rank."""
        names = {
            kind: {local: str(self._folder / f"rank-{local}.{kind}") for local in envs}
            for kind in ("out", "err", "error")
        }
        for local, environment in envs.items():
            environment["TORCHELASTIC_ERROR_FILE"] = names["error"][local]
        return LogsDest(stdouts=names["out"], stderrs=names["err"], error_files=names["error"])
