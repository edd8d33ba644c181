"""`diff EXPR`: one expression on all ranks, with equal answers grouped and the first difference located.

Ranks are compared as replicas. For DTensors, ranks with different coordinates on an axis that does not
replicate hold different shards, and a shard is compared only to its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from multiprocessing_pdb.console.broadcast import Answer, ask, explain_silence
from multiprocessing_pdb.console.grouping import group, name_ranks, show_block
from multiprocessing_pdb.console.search import show_tensor_difference
from multiprocessing_pdb.console.target import Target, read_number, read_text
from multiprocessing_pdb.wire.framing import Frame

_STATUS_SECONDS = 2.0
_MOST_SEARCHES = 8
_MOST_LEAVES = 1_000_000
_MOST_SHOWN = 3  # differing parts of a value that are shown in detail
_MOST_RANKS = 100_000

Leaves = dict[str, Frame]


@dataclass(frozen=True)
class Coverage:
    """Whether all ranks have answered: the names of the others, and whether the user selected ranks."""

    absent: str
    is_selected: bool

    @classmethod
    def find(cls, answers: Sequence[Answer], running: Sequence[Target] | None) -> Coverage:
        """Count the answers. `running` are ranks that were not asked, or None if the user selected some."""
        silent = [*(answer.target for answer in answers if answer.failure), *(running or ())]
        world = max((int(read_number(a.target.info, "world") or 0) for a in answers), default=0)
        known = {answer.target.number for answer in answers}
        unseen = [] if running is None else set(range(min(world, _MOST_RANKS))) - known
        return cls(name_ranks(silent, unseen), running is None)

    @property
    def note(self) -> str:
        """Return a remark on the absent ranks, or an empty string."""
        return f"; no value of {self.absent}" if self.absent else ""

    @property
    def equal(self) -> str:
        """Return on which ranks a value is equal, if it is on those that answered."""
        if self.absent:
            return f"equal on these{self.note}"
        return "equal on all selected" if self.is_selected else "equal on all"


def compare(
    targets: Sequence[Target], expression: str, seconds: float, running: Sequence[Target] | None
) -> str:
    """Return the answers by group. Other groups are compared to the largest one.

    `running` are ranks that cannot be asked, or None if the user selected the targets.
    """
    answers = ask(targets, {"do": "evaluate", "text": expression}, seconds)
    explain_silence(answers, _STATUS_SECONDS)
    return _show_comparison(answers, Coverage.find(answers, running), seconds)


def _show_comparison(answers: Sequence[Answer], coverage: Coverage, seconds: float) -> str:
    """Return one block per distinct answer, followed by the first difference of each."""
    failed = [answer for answer in answers if answer.failure]
    given = [answer for answer in answers if not answer.failure]
    blocks = [
        show_block(name_ranks([a.target for a in members]), f"*** {members[0].failure}")
        for members in group((answer.failure, answer) for answer in failed)
    ]
    shown: list[str] = []
    if any(_shard(_value(answer)) for answer in given):
        shown = _show_sharded(given, coverage, seconds)
    elif any(_value(answer).get("is_sharded") for answer in given):
        shown = _show_trees([given], coverage, seconds)
    elif given:
        shown = _show_replicas(given, coverage, seconds)
    return "\n".join([*shown, *blocks])


def _value(answer: Answer) -> Frame:
    value = answer.frame.get("value")
    return value if isinstance(value, dict) else {}


def _shard(value: Frame) -> Frame:
    shard = value.get("shard")
    return shard if isinstance(shard, dict) else {}


def _group(answers: Sequence[Answer]) -> list[list[Answer]]:
    return group((read_text(_value(answer), "key"), answer) for answer in answers)


def _show_value(value: Frame) -> str:
    return read_text(value, "text") + read_text(value, "content")


def _find_caveat(answers: Sequence[Answer]) -> str:
    return next((text for answer in answers if (text := read_text(_value(answer), "caveat"))), "")


def _show_replicas(answers: Sequence[Answer], coverage: Coverage, seconds: float) -> list[str]:
    groups = _group(answers)
    caveat = _find_caveat(answers)
    lines = []
    for members in groups:
        text = _show_value(_value(members[0]))
        if len(groups) == 1 and len(answers) > 1 and not text.startswith("not compared: "):
            text += f" (no difference seen, but {caveat})" if caveat else f" ({coverage.equal})"
        lines.append(show_block(name_ranks([a.target for a in members]), text))
    if len(groups) == 1:
        return lines
    if all(read_number(_value(members[0]), "length") for members in groups):
        return lines + _search(groups, seconds)
    if any((read_number(_value(members[0]), "leaves") or 0) > 1 for members in groups):
        return _show_trees(groups, coverage, seconds)
    return lines


def _search(groups: Sequence[Sequence[Answer]], seconds: float, path: str = "") -> list[str]:
    """Return the first differing element of each group compared to the largest group."""
    expected = groups[0]
    return [
        show_tensor_difference(
            _pair(expected, actual), (_value(expected[0]), _value(actual[0])), path, seconds
        )
        for actual in groups[1 : _MOST_SEARCHES + 1]
    ]


def _pair(expected: Sequence[Answer], actual: Sequence[Answer]) -> tuple[list[Target], list[Target]]:
    return [a.target for a in expected], [a.target for a in actual]


# A single DTensor.


def _show_sharded(answers: Sequence[Answer], coverage: Coverage, seconds: float) -> list[str]:
    """Show the shards of one tensor as one tensor, and the replicas that differ."""
    forms = group((repr(_value(answer).get("form")), answer) for answer in answers)
    if len(forms) > 1:
        return _show_replicas(answers, coverage, seconds)
    places: dict[str, list[Answer]] = {}
    for answer in answers:
        places.setdefault(read_text(_shard(_value(answer)), "place"), []).append(answer)
    differing = [(place, groups) for place, found in places.items() if len(groups := _group(found)) > 1]
    values = [_value(found[0]) for found in places.values()]
    text = f"{read_text(values[0], 'text')} in {len(places)} shard(s){_show_norm(values)}"
    copies = min(len(found) for found in places.values())
    if not differing:
        found = "replicas equal" if copies > 1 else "no replicas to compare"
        text += f" ({_find_caveat(answers) or found}{coverage.note})"
    lines = [show_block(name_ranks([a.target for a in answers]), text)]
    for place, groups in differing:
        lines += [f"shard {place}: {line}" for line in _search(groups, seconds)]
    return lines


def _show_norm(values: Sequence[Frame]) -> str:
    """Return the norm of the whole tensor, or an empty string for partial sums."""
    squares = [read_number(value, "squares") for value in values]
    if any(_shard(value).get("partial") for value in values) or None in squares:
        return ""
    return f", norm {math.sqrt(sum(square or 0.0 for square in squares)):.9g}"


# Values with parts: a model, an optimizer, a batch.


def _show_trees(groups: Sequence[Sequence[Answer]], coverage: Coverage, seconds: float) -> list[str]:
    """Show which parts differ.

    One rank per group of equal answers is read, or every rank for sharded values.
    """
    answers = [answer for members in groups for answer in members]
    sharded = any(_value(answer).get("is_sharded") for answer in answers)
    readers = [[answer] for answer in answers] if sharded else [list(members) for members in groups]
    leaves = _read_leaves([members[0] for members in readers], seconds)
    if isinstance(leaves, str):
        return [f"the values differ; where was not found: {leaves}"]
    paths = sorted({path for found in leaves for path in found})
    differing = [(path, parts) for path in paths if len(parts := _compare_leaf(path, readers, leaves)) > 1]
    count = sum(not path.endswith("#") for path in paths)  # the others are of containers
    number = f"{count} part(s) of {read_text(_value(answers[0]), 'type')}"
    everyone = name_ranks([answer.target for answer in answers])
    if not differing and len(groups) > 1:
        return [f"{everyone}: the values differ; where was not found"]
    if not differing:
        caveat = _find_caveat(answers)
        end = f"no difference seen, but {caveat}" if caveat else coverage.equal
        return [f"{everyone}: {number} ({end}{', shards among their replicas' if sharded else ''})"]
    lines = [f"{everyone}: {len(differing)} of {number} differ; first {_name(differing[0][0])}"]
    for path, parts in differing[:_MOST_SHOWN]:
        lines += _show_leaf(path, parts, seconds)
    if len(differing) > _MOST_SHOWN:
        rest = [_name(path) for path, _ in differing[_MOST_SHOWN:]]
        lines.append(f"and {', '.join(rest[:20])}{' ...' if len(rest) > 20 else ''}")
    return lines


def _name(path: str) -> str:
    return path.removesuffix("#") or "the value"


def _read_leaves(answers: Sequence[Answer], seconds: float) -> list[Leaves] | str:
    """Return the leaves of each answer by path, or an error message. Leaves are requested in pages."""
    found: list[Leaves] = [{} for _ in answers]
    waiting = list(range(len(answers)))
    begin = 0
    while waiting and begin < _MOST_LEAVES:
        pages = ask([answers[at].target for at in waiting], {"do": "leaves", "begin": begin}, seconds)
        size, more = 0, []
        for at, page in zip(waiting, pages, strict=True):
            leaves = page.frame.get("leaves")
            if page.failure or not isinstance(leaves, list):
                return f"{name_ranks([page.target])}: {page.failure or 'malformed answer'}"
            found[at].update({read_text(leaf, "path"): leaf for leaf in leaves if isinstance(leaf, dict)})
            size = max(size, len(leaves))
            more += [at] if leaves else []
        waiting, begin = more, begin + size
    return found


def _compare_leaf(
    path: str, readers: Sequence[Sequence[Answer]], leaves: Sequence[Leaves]
) -> list[tuple[list[Answer], Frame]]:
    """Return the groups of answers that agree on one part, the largest first.

    A single group means that the part is equal on all ranks. Shards are grouped only with their replicas.
    """
    places: dict[str, dict[str, list[int]]] = {}
    for at, found in enumerate(leaves):
        leaf = found.get(path, {})
        places.setdefault(read_text(_shard(leaf), "place"), {}).setdefault(read_text(leaf, "key"), []).append(
            at
        )
    worst = max(places.values(), key=len)
    groups = [
        ([a for at in members for a in readers[at]], leaves[members[0]].get(path, {}))
        for members in worst.values()
    ]
    return sorted(groups, key=lambda part: -len(part[0]))


def _show_leaf(path: str, parts: Sequence[tuple[list[Answer], Frame]], seconds: float) -> list[str]:
    lines = [f"  {_name(path)}"]
    for members, leaf in parts:
        place = read_text(_shard(leaf), "place")
        text = (read_text(leaf, "text") if leaf else "is not there") + (f" (shard {place})" if place else "")
        lines.append("    " + show_block(name_ranks([a.target for a in members]), text))
    expected, first = parts[0]
    for actual, leaf in parts[1:]:
        if read_number(first, "length") and read_number(first, "length") == read_number(leaf, "length"):
            found = show_tensor_difference(_pair(expected, actual), (first, leaf), path, seconds)
            lines.append(f"    {found}")
    return lines
