"""The arguments and options that several commands take."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """On what the ranks compute; `auto` takes CUDA when there is a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Cases = Annotated[
    list[Path],
    typer.Argument(metavar="CASE", help="Case files; a folder means all *.yaml in it.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=V", help="Set a field of every case, e.g. layout.tp=2; repeatable."),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "-k", metavar="PATTERN", help="Select cases by words in their names: 'fsdp and not (cp or tp)'."
    ),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="On what the ranks compute.")]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache", metavar="DIR", help="Where full tensors of goldens are kept; they can be made again."
    ),
]
GoldenFolder = Annotated[
    Path, typer.Option("--goldens", metavar="DIR", help="Where the goldens are that belong to the cases.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only what did not pass, and the last line.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all results for machines.")
]
JunitFile = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML for a CI server.")
]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page.")]

Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="Use at most this many ranks; cases that need more are skipped."),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", min=1.0, metavar="S", help="Seconds a case may take, in place of its own limit."
    ),
]
Fault = Annotated[
    str | None,
    typer.Option("--fault", metavar="PKG.MOD:FN", help="Call this on every rank before the layout is built."),
]
RequireGoldens = Annotated[
    bool | None,
    typer.Option(
        "--require-goldens/--no-require-goldens",
        help="Fail when a golden is missing instead of making it. Default: on when CI=true.",
        show_default=False,
    ),
]

DEFAULT_GOLDENS = Path("golden")
