"""Grouped display of the answers of many ranks: equal answers once, with the ranks that gave them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from multiprocessing_pdb.console.target import Target

Item = TypeVar("Item")


def name_ranks(targets: Sequence[Target], numbers: Iterable[int] = ()) -> str:
    """Return "rank 7", "ranks 0-3, 6" or, for those without a number, "process p71"."""
    ranked = sorted({*numbers, *(target.number for target in targets if target.number is not None)})
    others = [target.label for target in targets if target.number is None]
    runs: list[list[int]] = []
    for number in ranked:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    text = ("ranks " if len(ranked) > 1 else "rank ") + ", ".join(spans) if ranked else ""
    if others:
        text += ("; " if text else "") + ("processes " if len(others) > 1 else "process ") + ", ".join(others)
    return text


def group(pairs: Iterable[tuple[Hashable, Item]]) -> list[list[Item]]:
    """Group items by key. The largest group comes first, equal sizes in order of appearance."""
    groups: dict[Hashable, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return sorted(groups.values(), key=lambda members: -len(members))


def show_block(head: str, text: str) -> str:
    """Return "head: text" on one line, or the head followed by the indented text if it has several lines."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) == 1:
        return f"{head}: {lines[0]}"
    return "\n".join([f"{head}:", *(f"  {line}" for line in lines)])


def show_groups(answers: Sequence[tuple[Target, str]]) -> str:
    """Return one block for each distinct text."""
    groups = group((text.rstrip(), (target, text)) for target, text in answers)
    return "\n".join(show_block(name_ranks([t for t, _ in members]), members[0][1]) for members in groups)
