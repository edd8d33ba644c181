"""The last collectives before a failure: one row per rank, one column per collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from moeverify.report.meetings import PendingCollective, align_records
from moeverify.report.numbers import format_count, format_ranks
from moeverify.report.pictures.picture import Picture, clear_frame, make_figure
from moeverify.report.pictures.theme import COLORS
from moeverify.report.sanitize import clean
from moeverify.report.words.collective import name_collective
from moeverify.results.run import CaseResult, RankReport
from moeverify.results.trace import CollectiveRecord

TITLE = "Last collectives of the ranks"
_MOST_RANKS = 16
_MOST_COLUMNS = 12
_MOST_SENTENCES = 3
_NUM_COLORS = 8
_ROW, _COLUMN = 0.5, 0.7  # inches
_LABEL = 0.9  # inches, for the rank labels
_MIN_COLUMNS = 8  # the width of the legend
_INSET = 0.05


def draw(case: CaseResult) -> Picture | None:
    """Return the picture; None if the ranks did not fail, or issued no collective."""
    # The first reports are from the ranks where the failure began.
    reports = sorted(case.rank_reports[:_MOST_RANKS], key=lambda report: report.rank)
    columns = align_records({report.rank: report.recent for report in reports})[-_MOST_COLUMNS:]
    if not columns:
        return None
    colors = _choose_colors(columns)
    figure = make_figure(_LABEL + _COLUMN * max(len(columns), _MIN_COLUMNS), 0.9 + _ROW * len(reports))
    axes = figure.add_subplot()
    clear_frame(axes)
    rows = {report.rank: row for row, report in enumerate(reports)}
    for position, meeting in enumerate(columns):
        for rank, record in meeting.records.items():
            _draw_record(axes, position, rows[rank], record, colors[record.axis])
        for rank in sorted(meeting.missing & rows.keys()):
            _draw_missing(axes, position, rows[rank])
    axes.set_xlim(0, max(len(columns), _MIN_COLUMNS))
    axes.set_ylim(len(reports), 0)
    axes.set_yticks(
        [row + 0.5 for row in rows.values()], [f"rank {report.rank}\n{report.state}" for report in reports]
    )
    axes.tick_params(length=0)
    figure.legend(handles=_make_handles(columns, colors), loc="outside lower left", ncols=4)
    return Picture(TITLE, _describe(columns, reports, len(case.rank_reports)), figure)


def _choose_colors(columns: Sequence[PendingCollective]) -> Mapping[str, str]:
    """Return the colour of each mesh axis, the most used axis first."""
    used = Counter(record.axis for meeting in columns for record in meeting.records.values())
    return {
        axis: COLORS[f"part-{position % _NUM_COLORS}"]
        for position, (axis, _) in enumerate(used.most_common())
    }


def _draw_record(axes: Axes, column: int, row: int, record: CollectiveRecord, color: str) -> None:
    """Draw a collective: filled if it finished, framed otherwise."""
    text = clean(record.op).replace("_", "\n")
    if record.state == "finished":
        _draw_cell(axes, column, row, text, color, color, COLORS["back"])
    else:
        _draw_cell(axes, column, row, text, COLORS["back"], COLORS["mismatch"], COLORS["mismatch"])


def _draw_missing(axes: Axes, column: int, row: int) -> None:
    """Draw the cell of a rank that its peers are waiting for."""
    _draw_cell(axes, column, row, "missing", COLORS["mismatch"], COLORS["mismatch"], COLORS["back"])


def _draw_cell(axes: Axes, column: int, row: int, text: str, face: str, edge: str, ink: str) -> None:
    rectangle = Rectangle(
        (column + _INSET, row + _INSET),
        1 - 2 * _INSET,
        1 - 2 * _INSET,
        facecolor=face,
        edgecolor=edge,
        linewidth=0.5 if face == edge else 1.6,  # frames must be visible
    )
    axes.add_patch(rectangle)
    center: dict[str, Any] = {"ha": "center", "va": "center"}
    axes.text(column + 0.5, row + 0.5, text, fontsize=6.5, linespacing=0.95, color=ink, **center)


def _make_handles(columns: Sequence[PendingCollective], colors: Mapping[str, str]) -> list[Patch]:
    handles = [
        Patch(facecolor=color, label=clean(axis) if axis else "other groups")
        for axis, color in list(colors.items())[:_NUM_COLORS]
    ]
    if any(meeting.open_ranks for meeting in columns):
        frame = Patch(facecolor="none", edgecolor=COLORS["mismatch"], linewidth=1.6, label="not over")
        handles.append(frame)
    if any(meeting.missing for meeting in columns):
        handles.append(Patch(facecolor=COLORS["mismatch"], label="a rank that others wait for"))
    return handles


def _describe(columns: Sequence[PendingCollective], reports: Sequence[RankReport], num_ranks: int) -> str:
    states = {report.rank: report.state for report in reports}
    sentences = [_describe_open(meeting, states) for meeting in columns if meeting.open_ranks]
    sentences += [_describe_disagreement(meeting) for meeting in columns if meeting.disagrees]
    more = len(sentences) - _MOST_SENTENCES
    sentences = sentences[:_MOST_SENTENCES]
    if more > 0:
        sentences.append(f"{format_count(more, 'more collective')} not over.")
    if not sentences:
        sentences.append("Every collective drawn here is over.")
    sentences.append("Columns are in the order of issue and not in time; ranks of one column meet there.")
    if num_ranks > len(reports):
        sentences.append(f"{format_count(num_ranks - len(reports), 'further rank')} not drawn.")
    return " ".join(sentences)


def _describe_open(meeting: PendingCollective, states: Mapping[int, str]) -> str:
    first = meeting.records[min(meeting.open_ranks)]
    text = f"{name_collective(first)} is not over on {format_ranks(sorted(meeting.open_ranks))}"
    if meeting.missing:
        absent = ", ".join(
            f"rank {rank} ({states[rank]})" if rank in states else f"rank {rank}"
            for rank in sorted(meeting.missing)
        )
        text += f"; missing: {absent}"
    return f"{text}."


def _describe_disagreement(meeting: PendingCollective) -> str:
    issued = ", ".join(f"rank {rank} {record.op}" for rank, record in sorted(meeting.records.items()))
    first = next(iter(meeting.records.values()))
    return f"Ranks meet in different collectives at #{first.sequence} of their group: {issued}."
