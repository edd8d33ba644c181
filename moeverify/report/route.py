"""Console output of one batch passing through a MoE layer: router, dispatch, experts, combine."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text

from moeverify.report.colours import RIGHT, WRONG, find_colour, style_rank
from moeverify.report.console import new_table, print_lines, print_table
from moeverify.report.numbers import format_count, format_number
from moeverify.report.sanitize import clean
from moeverify.results.route import Choice, RouteReport, RouteResult, TokenRoute

_WIDE = 80  # narrower terminals show only the chosen experts, without token ids and norms


def render_route(report: RouteReport, console: Console) -> None:
    """Print the routing of one case."""
    found = report.result
    head = Text.assemble(
        (clean(report.case), "bold"), f"  {format_count(report.ranks, 'rank')}, {report.layout}"
    )
    if found is None:
        print_lines(console, Text.assemble(head, "  ", ("not followed: ", WRONG), clean(report.reason)))
        return
    head.append(
        f"; layer {found.layer}, step {found.step}: {format_count(found.num_tokens, 'token')}"
        f" ({found.num_padding} of padding), each to {found.top_k} of {found.num_experts} experts"
    )
    print_lines(console, head)
    _print_title(console, "router: expert x weight -> the rank that computed it")
    _print_tokens(found, console)
    _print_title(console, "dispatch: copies that each rank (row) had computed on each rank (column)")
    _print_sent(found, console)
    _print_title(console, "experts: copies that each computed")
    _print_computed(found, console)
    console.print()
    _print_verdict(found, console)


def _print_title(console: Console, text: str) -> None:
    console.print()
    print_lines(console, Text(text, style="bold"))


def _print_tokens(found: RouteResult, console: Console) -> None:
    table = new_table(console)
    is_wide = console.width >= _WIDE
    for header in ("rank", "row", "position", "token") if is_wide else ("rank", "row", "pos"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("experts", overflow="fold", min_width=15)
    for header in ("|x|", "|combined|") * is_wide:
        table.add_column(header, justify="right", no_wrap=True)
    for rank, tokens in groupby(found.tokens, lambda token: token.rank):
        for token in tokens:
            table.add_row(
                style_rank(rank),
                str(token.row),
                str(token.position),
                *(["padding" if token.is_padding else str(token.token)] * is_wide),
                _show_choices(token),
                *map(format_number, (token.norm, token.combined_norm) * is_wide),
            )
    print_table(table, console)
    rest = found.num_tokens - len(found.tokens)
    if rest:
        print_lines(console, Text(f"and {format_count(rest, 'more token')}: --tokens N shows N of each rank"))


def _show_choices(token: TokenRoute) -> Text:
    return Text("   ").join(map(_show_choice, token.choices))


def _show_choice(choice: Choice) -> Text:
    text = Text(f"{choice.expert} x {choice.weight:.3f} -> ")
    return text + (Text("LOST", style=WRONG) if choice.rank is None else style_rank(choice.rank))


def _print_sent(found: RouteResult, console: Console) -> None:
    table = new_table(console)
    table.add_column("from \\ to", justify="right", no_wrap=True)
    has_hosts = len(set(found.hosts)) > 1
    if has_hosts:
        table.add_column("node", overflow="fold")
    for rank in range(len(found.sent)):
        table.add_column(style_rank(rank), justify="right", no_wrap=True)
    for rank, row in enumerate(found.sent):
        cells = [
            Text(str(count) if count else "-", style=find_colour(to) if to != rank else "")
            for to, count in enumerate(row)
        ]
        table.add_row(style_rank(rank), *([Text(clean(found.hosts[rank]))] if has_hosts else []), *cells)
    print_table(table, console)


def _print_computed(found: RouteResult, console: Console) -> None:
    """Print the load of each rank, and its ratio to the mean over all ranks with load."""
    totals = [sum(by_expert.values()) for by_expert in found.computed]
    busy = [total for total in totals if total]
    mean = sum(busy) / len(busy) if busy else 1.0
    table = new_table(console)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("expert: copies", overflow="fold")
    table.add_column("copies", justify="right", no_wrap=True)
    table.add_column("of the mean", justify="right", no_wrap=True)
    for rank, by_expert in enumerate(found.computed):
        load = "  ".join(f"{expert}: {count}" for expert, count in by_expert.items()) or "-"
        table.add_row(style_rank(rank), Text(load), str(totals[rank]), f"{totals[rank] / mean:.2f}")
    print_table(table, console)


def _print_verdict(found: RouteResult, console: Console) -> None:
    copies = f"{found.num_copies} {'copy' if found.num_copies == 1 else 'copies'}"
    rows = [
        (
            not found.num_lost and not found.num_surplus,
            "dispatch",
            f"{copies} chosen, {found.num_lost} dropped, {found.num_surplus} computed that nobody chose",
        )
    ]
    if found.combine is None:
        rows.append(
            (
                True,
                "combine",
                "not checked: a rank has a part of each expert, so its outputs are partial sums",
            )
        )
    else:
        error, bound = format_number(found.combine.error), format_number(found.combine.bound)
        many = format_count(found.combine.num_tokens, "token")
        rows.append(
            (
                found.combine.is_right,
                "combine",
                f"sum of weight x output of {many}: largest difference {error}, bound {bound}",
            )
        )
    for is_right, name, text in rows:
        word = Text("pass    " if is_right else "MISMATCH", style=RIGHT if is_right else WRONG)
        print_lines(console, word + Text(f"  {name}  {text}"))
