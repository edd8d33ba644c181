"""The output files of a command: checked before the work, written after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from moeverify.cli.arguments import file_of_format
from moeverify.cli.github import is_github, publish_run
from moeverify.cli.options import OptionGroup
from moeverify.report.formats.registry import FORMATS, write_run

if TYPE_CHECKING:
    from moeverify.cli.context import CommandContext
    from moeverify.report.next_steps import Kept
    from moeverify.results.run import RunResult


JsonBrief = Annotated[
    bool, typer.Option("--json-brief", help="Print less than 4 kB of JSON instead of the report.")
]


@dataclass(frozen=True)
class Outputs(OptionGroup):
    """The outputs of a run: one file per requested format, and the folder that keeps everything, if any.

    `github` enables or disables annotations; None enables them in GitHub workflows only. With `brief`,
    the short JSON replaces the report.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    github: bool | None = None
    brief: bool = False

    @classmethod
    def list_options(cls) -> Sequence[Parameter]:
        """Return one option per format, `--json-brief` and `--github`; see `OptionGroup`."""
        brief = Parameter("json_brief", Parameter.KEYWORD_ONLY, default=False, annotation=JsonBrief)
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
                annotation=Annotated[Path | None, file_of_format(each.name)],
            )
            for each in FORMATS
        ]
        return [*formats, brief, github]

    @classmethod
    def gather(cls, values: Mapping[str, Any]) -> Self:
        """Return the outputs that the options request; see `OptionGroup`."""
        files = {each.name: values[each.name] for each in FORMATS if values[each.name] is not None}
        return cls(files, github=values["github"], brief=values["json_brief"])

    def keeping(self, folder: Path | None) -> Outputs:
        """Return the same outputs with the folder that keeps everything."""
        return replace(self, folder=folder)

    def check(self) -> None:
        """Check that all outputs can be written, and create their folders.

        Raises: CaseError listing every path that cannot be written.
        """
        from moeverify.report.files import check_writable

        of_folders = {each.name for each in FORMATS if each.is_folder}
        folders = [path for name, path in self.files.items() if name in of_folders]
        files = [path for name, path in self.files.items() if name not in of_folders]
        check_writable(files, *folders, self.folder)

    def direct(self, context: CommandContext) -> CommandContext:
        """Return a context that leaves standard output to the short JSON, if it is asked for."""
        return replace(context, out=context.err) if self.brief else context

    def render(self, run: RunResult, context: CommandContext, kept: Kept, *, quiet: bool) -> None:
        """Print the report, or the short JSON."""
        from moeverify.report.text import render_run

        if not self.brief:
            render_run(run, context.out, folder=kept.folder, file=kept.file, quiet=quiet)
        elif context.is_first:
            from moeverify.report.brief import format_brief

            typer.echo(format_brief(run, kept))
            context.reply.is_brief = False

    def write(self, run: RunResult, context: CommandContext, *, quiet: bool = False) -> list[str]:
        """Write all requested files, and return the failures with their reasons.

        The console of errors shows that this is going on. Files are written even if its reader is gone.
        """
        from moeverify.report.progress import show_work

        files = list(self._list_files())
        failures = []
        shown = ExitStack()
        if files:
            names = ", ".join(str(path) for _, path in files)
            with suppress(OSError):
                shown.enter_context(show_work(context.err, f"writing {names}", quiet=quiet))
        for name, path in files:
            try:
                write_run(name, run, path)
                if path == context.reply.file:
                    context.reply.file = None
            except OSError as error:
                failures.append(f"{path} was not written: {error.strerror or error}")
            except Exception as error:  # while drawing or rendering; the rest is still written
                failures.append(f"{path} was not written: {type(error).__name__}: {error}")
        with suppress(OSError):
            shown.close()
        return failures

    def publish(self, run: RunResult, context: CommandContext) -> list[str]:
        """Annotate the run on GitHub if enabled, and return the failures."""
        if not context.is_first or not (is_github() if self.github is None else self.github):
            return []
        failure = publish_run(run, context.out)
        return [failure] if failure else []

    def find_kept(self) -> Path | None:
        """Return the file of the folder from which later commands read the run; None without a folder."""
        from moeverify.report.formats.json import RUN_FILE

        return None if self.folder is None else self.folder / RUN_FILE

    def _list_files(self) -> Iterator[tuple[str, Path]]:
        """Yield the format and path of each file; the kept copy is JSON, which can be read again."""
        kept = self.find_kept()
        if kept is not None:
            yield "json", kept
        yield from self.files.items()
