"""`moeverify convert`: conversion of weights between formats."""

from __future__ import annotations

import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeverify.cli.arguments import Quiet
from moeverify.cli.context import open_context

if TYPE_CHECKING:
    from moeverify.tools.weights.description import Description


class WeightFormat(StrEnum):
    """Formats of weights."""

    hf = "hf"
    dcp = "dcp"
    megablocks = "megablocks"


_DROP_HELP = "Leave out tensors whose keys in SOURCE match, e.g. 'model.layers.61.*'; repeatable."


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder with weights.", show_default=False)
    ],
    destination: Annotated[
        Path,
        typer.Argument(metavar="DESTINATION", help="A folder that is not there yet.", show_default=False),
    ],
    *,
    to: Annotated[WeightFormat, typer.Option("--to", help="The format of DESTINATION.", show_default=False)],
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME", help="Which model it is, if SOURCE does not say it."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The model as a config.json of Hugging Face."),
    ] = None,
    drop: Annotated[list[str] | None, typer.Option("--drop", metavar="PATTERN", help=_DROP_HELP)] = None,
    shard_size: Annotated[
        float,
        typer.Option("--shard-size", min=0.0, metavar="GB", help="Largest size of a safetensors file."),
    ] = 5.0,
    quiet: Quiet = False,
) -> None:
    """Convert weights between safetensors of Hugging Face, DCP and megablocks, bit for bit.

    Streams: about one piece of 64 MiB is in memory. DESTINATION appears when it is complete, or not at all.
    """
    with open_context() as context:
        from moeverify.report.transfer import describe_transfer, open_transfer
        from moeverify.results.answer import ConvertResult
        from moeverify.tools.weights.stream import convert as convert_weights

        described = _describe(preset, config)
        started = time.monotonic()
        with open_transfer(context.out, quiet=quiet) as on_progress:
            done = convert_weights(
                source,
                destination,
                to.value,
                described=described,
                drop=tuple(drop or ()),
                shard_bytes=int(shard_size * 1e9),
                on_progress=on_progress,
            )
        seconds = time.monotonic() - started
        text = describe_transfer(done.num_tensors, done.num_bytes, done.num_files, seconds)
        context.out.print(
            f"{source} ({done.source_kind}) -> {destination} ({to.value}): {text}", soft_wrap=True
        )
        context.reply.facts = ConvertResult(
            source=str(source),
            destination=str(destination),
            destination_kind=to.value,
            seconds=seconds,
            **asdict(done),
        )


def _describe(preset: str | None, config: Path | None) -> Description | None:
    """Return the model named by the options, or None to use the description in the source."""
    from moeverify.cases.presets import PRESETS
    from moeverify.cases.suggest import suggest
    from moeverify.errors import CaseError, Problem
    from moeverify.tools.weights.description import describe_preset, read_config_file

    if preset is not None and config is not None:
        raise CaseError(
            [Problem("--preset and --config both say which model it is", remedy="give one of them")]
        )
    if preset is not None and preset not in PRESETS:
        raise CaseError(
            [Problem(f"unknown preset `{preset}`", path="--preset", remedy=suggest(preset, PRESETS))]
        )
    if preset is not None:
        return describe_preset(PRESETS[preset])
    return None if config is None else read_config_file(config)
