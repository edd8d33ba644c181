"""The files that a command was asked to write: checked before the work, written after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from moeverify.cli.github import is_github, publish_run
from moeverify.cli.options import OptionGroup
from moeverify.report.formats.registry import FORMATS, write_run

if TYPE_CHECKING:
    from moeverify.cli.context import CommandContext
    from moeverify.results.run import RunResult


@dataclass(frozen=True)
class Outputs(OptionGroup):
    """Where a run is to be written: a file for each format that was asked for, and the folder of all, if any.

    `github` says whether a run is annotated there too; by itself it is, in a step of a workflow.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    github: bool | None = None

    @classmethod
    def list_options(cls) -> Sequence[Parameter]:
        """Return an option for each format; see `OptionGroup`."""
        github = Parameter(
            "github",
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                bool | None,
                typer.Option(
                    "--github/--no-github",
                    help="Print annotations of GitHub and write its job summary. [default: in a workflow]",
                ),
            ],
        )
        formats = [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    Path | None,
                    typer.Option(
                        f"--{each.name}", metavar="DIR" if each.is_folder else "FILE", help=each.help
                    ),
                ],
            )
            for each in FORMATS
        ]
        return [*formats, github]

    @classmethod
    def gather(cls, values: Mapping[str, Any]) -> Self:
        """Return the files that were asked for; see `OptionGroup`."""
        files = {each.name: values[each.name] for each in FORMATS if values[each.name] is not None}
        return cls(files, github=values["github"])

    def keeping(self, folder: Path | None) -> Outputs:
        """Return the same outputs with the folder in which everything is kept."""
        return replace(self, folder=folder)

    def check(self) -> None:
        """Make sure that all can be written, and make their folders.

        Raises: CaseError with every path that cannot be written.
        """
        from moeverify.report.files import check_writable

        of_folders = {each.name for each in FORMATS if each.is_folder}
        folders = [path for name, path in self.files.items() if name in of_folders]
        files = [path for name, path in self.files.items() if name not in of_folders]
        check_writable(files, *folders, self.folder)

    def write(self, run: RunResult) -> list[str]:
        """Write everything that was asked for and return what could not be written, with the reason."""
        failures = []
        for name, path in self._list_files():
            try:
                write_run(name, run, path)
            except OSError as error:
                failures.append(f"{path} was not written: {error.strerror or error}")
            except Exception as error:  # of what draws or renders: the verdict and the other files do without
                failures.append(f"{path} was not written: {type(error).__name__}: {error}")
        return failures

    def publish(self, run: RunResult, context: CommandContext) -> list[str]:
        """Annotate the run on GitHub where that is wanted, and return what could not be written there."""
        if not context.is_first or not (is_github() if self.github is None else self.github):
            return []
        failure = publish_run(run, context.out)
        return [failure] if failure else []

    def _list_files(self) -> Iterator[tuple[str, Path]]:
        """Yield the format and the path of each file; what is kept can be read again, so it is JSON."""
        if self.folder is not None:
            from moeverify.report.formats.json import RUN_FILE

            yield "json", self.folder / RUN_FILE
        yield from self.files.items()
