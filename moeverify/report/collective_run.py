"""Console output of one collective: inputs, split sizes, outputs and correctness of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from rich.console import Console
from rich.text import Text

from moeverify.report.colours import RIGHT, WRONG, find_colour, style_rank
from moeverify.report.console import new_table, print_lines, print_table
from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.sanitize import clean
from moeverify.report.words.collective_run import describe_collective, describe_padding
from moeverify.results.collective_run import CollectiveRun, Parts, TensorSpan, flatten

_SUM = "bold"


def render_collective(run: CollectiveRun, console: Console) -> None:
    """Print the forward pass, the backward pass if it ran, and a last line with the verdict."""
    transfer = run.transfer
    words = describe_collective(transfer)
    num_ranks = len(transfer.ranks)
    kind = f"{run.environment['backend']} on {run.environment['device']}"
    title = f"  {format_count(num_ranks, 'rank')}, {kind}, torch {run.environment['torch']}"
    print_lines(console, Text.assemble((transfer.collective.value, "bold"), title))
    _print_all(console, f"forward: {words.meaning}", words.call, describe_padding(transfer))
    rows = [
        (mine.input, mine.sends, mine.receives, mine.output, values.output)
        for mine, values in zip(transfer.ranks, run.values, strict=True)
    ]
    _print_rows(console, run, ("input", "sends", "receives", "output"), rows)
    if any(values.input_gradient is not None for values in run.values):
        console.print()
        _print_all(console, f"backward: {words.backward}", words.backward_call, "")
        rows = [
            (
                mine.output_gradient,
                mine.receives,
                mine.sends,
                mine.input_gradient,
                values.input_gradient or (),
            )
            for mine, values in zip(transfer.ranks, run.values, strict=True)
        ]
        headers = ("gradient of output", "sends", "receives", "gradient of input")
        _print_rows(console, run, headers, rows)
        if words.advice:
            print_lines(console, Text(words.advice))
    console.print()
    wrong = run.wrong_ranks
    if wrong:
        text = f"mismatch  {format_ranks(wrong)} got something else than the definition says"
        print_lines(console, Text(text, style=WRONG))
    else:
        done = "output and gradient" if run.values[0].input_gradient is not None else "output"
        print_lines(
            console, Text(f"pass  {done} of every rank equal the definition, bit for bit", style=RIGHT)
        )


def _print_all(console: Console, *lines: str) -> None:
    for line in filter(None, lines):
        print_lines(console, Text(line))


# Input parts, sizes sent, sizes received, expected output parts, and the elements that were received.
_Row = tuple[Parts, Sequence[int], Sequence[int], Parts, Sequence[float]]


def _print_rows(console: Console, run: CollectiveRun, headers: Sequence[str], rows: Sequence[_Row]) -> None:
    table = new_table(console)
    table.add_column("rank", justify="right", no_wrap=True)
    hosts = [clean(values.host) for values in run.values]
    has_hosts = len(set(hosts)) > 1
    for header in (*(["node"] if has_hosts else []), *headers, ""):
        table.add_column(header, overflow="fold")
    for rank, (given, sends, receives, expected, actual) in enumerate(rows):
        is_right = flatten(expected) == tuple(actual)
        table.add_row(
            style_rank(rank),
            *([Text(hosts[rank])] if has_hosts else []),
            _join(map(_show_part, given)),
            Text(" ".join(map(str, sends))),
            Text(" ".join(map(str, receives))),
            _join(map(_show_part, expected)) if is_right else _join(_show_actual(expected, actual)),
            Text("equal", style=RIGHT) if is_right else Text("WRONG", style=WRONG),
        )
    print_table(table, console)


def _join(parts: Iterator[Text]) -> Text:
    return Text(" | ").join(list(parts))


def _show_part(part: TensorSpan) -> Text:
    """Return the numbers in the colour of their rank of origin; an empty part is a dash."""
    text = " ".join(f"{value:.0f}" for value in part.values) or "-"
    return Text(text, style=_SUM if part.origin is None else find_colour(part.origin))


def _show_actual(expected: Parts, actual: Sequence[float]) -> Iterator[Text]:
    """Yield the received elements, split as the expected parts; the expected value follows each wrong one."""
    ends = accumulate((len(part.values) for part in expected), initial=0)
    for part, (start, stop) in zip(expected, pairwise(ends), strict=True):
        came = [*actual[start:stop], *[None] * (stop - start)][: stop - start]
        yield (
            Text(" ").join(
                _show_part(TensorSpan(origin=part.origin, values=(right,)))
                if value == right
                else Text(
                    f"{'nothing' if value is None else format(value, '.6g')}(not {right:.0f})", style=WRONG
                )
                for value, right in zip(came, part.values, strict=True)
            )
            if part.values
            else Text("-")
        )
    surplus = actual[len(flatten(expected)) :]
    if surplus:
        yield Text(" ".join(f"{value:.6g}(too many)" for value in surplus), style=WRONG)
