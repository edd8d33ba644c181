"""`diff --golden [EXPR]`: values of all ranks, merged over shards, compared to their expected values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from multiprocessing_pdb.console.broadcast import Answer, ask, explain_silence
from multiprocessing_pdb.console.comparison import Coverage
from multiprocessing_pdb.console.grouping import group, name_ranks, show_block
from multiprocessing_pdb.console.target import Target, read_text
from multiprocessing_pdb.wire.framing import Frame

_STATUS_SECONDS = 2.0
_MOST_ROWS = 1_000_000
_MOST_SHOWN = 5  # differing tensors shown with an element; the others are listed by name


@dataclass
class LogicalTensor:
    """The answers of all ranks about one logical tensor, as (rank, row)."""

    name: str
    rows: list[tuple[Target, Frame]] = field(default_factory=list)

    @property
    def bound(self) -> float:
        """Return the allowed error: the smallest bound of any rank, or -1 if one is invalid."""
        bounds = [_read_float(row, "bound") for _, row in self.rows]
        return min(bounds) if all(0.0 <= bound < math.inf for bound in bounds) else -1.0

    @property
    def error(self) -> float:
        """Return |actual - expected| / |expected|. Each shard counts once, with its worst replica."""
        shards: dict[str, float] = {}
        for _, row in self.rows:
            region = read_text(row, "region")
            shards[region] = max(shards.get(region, 0.0), _read_square(row))
        total = sum(shards.values())
        norm = min(_read_float(row, "norm") for _, row in self.rows)
        if total == 0.0:
            return 0.0
        return math.sqrt(total) / norm if 0.0 < norm < math.inf else math.inf

    @property
    def differs(self) -> bool:
        """Return whether the error exceeds the bound. NaN counts as exceeding."""
        return not self.error <= self.bound

    def find_worst(self) -> tuple[Target, Frame]:
        """Return the rank whose shard differs most, with its row."""
        return max(self.rows, key=lambda item: _read_square(item[1]))

    def find_ranks(self) -> list[Target]:
        """Return the ranks with at least 1% of the worst rank's squared error."""
        most = _read_square(self.find_worst()[1])
        return [target for target, row in self.rows if most > 0.0 and _read_square(row) >= 0.01 * most]


def compare_with_golden(
    targets: Sequence[Target], expression: str, seconds: float, running: Sequence[Target] | None
) -> str:
    """Return how a value differs from the expected one. An empty expression compares all complete values.

    `running` are ranks that cannot be asked, or None if the user selected the targets.
    """
    answers = ask(targets, {"do": "compare", "text": expression}, seconds)
    explain_silence(answers, _STATUS_SECONDS)
    tensors = _read_tensors([answer for answer in answers if not answer.failure], seconds)
    coverage = Coverage.find(answers, running)  # a shard of another rank is not compared
    failed = [answer for answer in answers if answer.failure]
    blocks = [
        show_block(name_ranks([a.target for a in members]), f"*** {members[0].failure}")
        for members in group((answer.failure, answer) for answer in failed)
    ]
    given = [answer.target for answer in answers if not answer.failure]
    if given and not tensors:
        blocks.insert(0, f"{name_ranks(given)}: nothing here can be compared yet")
    elif given:
        verdict, *rest = format_verdicts(tensors, given)
        blocks[:0] = [verdict + coverage.note, *rest]
    notes = {text for answer in answers if (text := read_text(answer.frame, "note"))}
    blocks += [f"  {text}" for text in sorted(notes)]
    return "\n".join(blocks)


def _read_tensors(answers: Sequence[Answer], seconds: float) -> list[LogicalTensor]:
    """Return the logical tensors in order of creation. Rows are requested in pages."""
    found: dict[str, LogicalTensor] = {}
    waiting, begin = list(answers), 0
    while waiting and begin < _MOST_ROWS:
        pages = ask([answer.target for answer in waiting], {"do": "rows", "begin": begin}, seconds)
        size, more = 0, []
        for answer, page in zip(waiting, pages, strict=True):
            rows = page.frame.get("rows")
            if page.failure or not isinstance(rows, list):
                answer.failure = page.failure or "malformed answer"
                continue
            for row in rows:
                if isinstance(row, dict):
                    name = read_text(row, "name")
                    found.setdefault(name, LogicalTensor(name)).rows.append((answer.target, row))
            size = max(size, len(rows))
            more += [answer] if rows else []
        waiting, begin = more, begin + size
    return list(found.values())


def format_verdicts(tensors: Sequence[LogicalTensor], targets: Sequence[Target]) -> list[str]:
    """Return the lines for these ranks' tensors: the verdict, and the largest difference of each tensor."""
    head = name_ranks(targets)
    differing = [tensor for tensor in tensors if tensor.differs]
    if len(tensors) == 1:
        verdict = "differs from the golden" if differing else "is as in the golden"
        head += f": {tensors[0].name} {verdict}: {_format_error(tensors[0])}"
        return [head, *(_format_worst(tensor) for tensor in differing)]
    if not differing:
        nearest = max(tensors, key=lambda tensor: tensor.error / tensor.bound if tensor.bound else 0.0)
        return [
            f"{head}: {len(tensors)} tensors are as in the golden; nearest to its bound is {nearest.name}:"
            f" {_format_error(nearest)}"
        ]
    lines = [f"{head}: {len(differing)} of {len(tensors)} tensors differ from the golden"]
    for tensor in differing[:_MOST_SHOWN]:
        lines += [f"  {tensor.name}: {_format_error(tensor)}", f"  {_format_worst(tensor)}"]
    rest = [tensor.name for tensor in differing[_MOST_SHOWN:]]
    if rest:
        lines.append(f"and {', '.join(rest[:20])}{' ...' if len(rest) > 20 else ''}")
    return lines


def _format_error(tensor: LogicalTensor) -> str:
    return f"relative error {tensor.error:.3g}, bound {tensor.bound:.3g}"


def _format_worst(tensor: LogicalTensor) -> str:
    target, row = tensor.find_worst()
    values = f"expected {_read_float(row, 'expected'):.9g}, actual {_read_float(row, 'actual'):.9g}"
    return (
        f"  on {name_ranks(tensor.find_ranks())}; most on {name_ranks([target])}"
        f" at {row.get('index')}: {values}"
    )


def _read_float(row: Frame, name: str) -> float:
    """Return a number of a row.

    Text is converted, since JSON lacks NaN and infinity; malformed values are NaN.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _read_square(row: Frame) -> float:
    """Return the squared error of a shard, or infinity if it is not finite or malformed."""
    value = _read_float(row, "squared_error")
    return value if 0.0 <= value < math.inf else math.inf
