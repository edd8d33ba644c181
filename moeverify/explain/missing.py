"""Calls that right results of the same kind have passed and a wrong result has not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from moeverify.explain.cause import Cause
from moeverify.explain.chains import list_of_step, walk_back
from moeverify.explain.joint import At, Joint
from moeverify.explain.program import Site
from moeverify.explain.sites import is_of_user
from moeverify.explain.suspects import Target
from moeverify.explain.user_lines import UserLines, make_origin
from moeverify.results.culprit import Origin

_MOST_FOLLOWED = 48
"""Maximum number of operators that are followed upstream."""


class MissingCalls:
    """Search for a collective or setup line that most `right` results of a kind have passed."""

    def __init__(self, joint: Joint, lines: UserLines, right: Sequence[Target]) -> None:
        self._joint, self._lines, self._right = joint, lines, right

    def find(self, cause: Cause) -> Iterator[Origin]:
        """Yield a collective or setup line of right results of this kind that the wrong one has not passed.

        Most right results have passed it, or their computation shares a line with that of the wrong one.
        """
        target, rank = cause.targets[0], cause.ops[0][0]
        right = [each for each in self._right if each.mark[1] == target.mark[1] and rank in each.values]
        met, before = self._list_met(target.values.get(rank))
        mine = {self._lines.stack(op)[:2] for op in met}
        near = {(site.file, site.line) for op in before for site in self._lines.stack(op)[:1]}
        counts: Counter[tuple[Site, ...]] = Counter()
        found: dict[tuple[Site, ...], tuple[At, Target]] = {}
        for each in right:
            for op in self._list_met(each.values[rank])[0]:
                sites = self._lines.stack(op)[:2]
                is_near = any((site.file, site.line) in near for site in sites[1:])
                counts[sites] += len(right) if is_near else 1
                found[sites] = op, each
        for sites, count in counts.most_common(1):
            if 2 * count > len(right) and sites not in mine:
                op, each = found[sites]
                shown = list(self._describe(op, self._list_words(target.mark[2], each.mark[2])))
                yield from shown
                if shown:
                    return
        makers = {each.mark[2]: self._lines.makers.get((rank, each.mark[2])) for each in (target, *right)}
        made = {name: self._lines.made_at(op)[:1] for name, op in makers.items() if op is not None}
        for sites, count in Counter(filter(None, made.values())).most_common(1):
            if 2 * count > len(right) and not made.get(target.mark[2]):
                yield make_origin("missing", sites)

    def _describe(self, op: At, words: Collection[str]) -> Iterator[Origin]:
        """Yield the call of a collective, and the conditions of the call: lines with these words first."""
        recorded, stack = self._joint.op(op), self._lines.stack(op)
        if any(is_of_user(site.file) for site in recorded.sites):
            yield make_origin("missing", stack)
            program = self._joint.programs[op[0]]
            sites = program.ops[recorded.origin].sites if recorded.origin >= 0 else self._lines.sites(op)
            yield from self._lines.define(sites, of_conditions=True, words=words)
        elif recorded.meeting is not None and not stack:
            yield from self._lines.list_calls(op[0], recorded.meeting.group.name)

    def _list_words(self, *names: str) -> set[str]:
        """Return the parts of names of tensors that most tensors do not have in theirs."""
        names_of_all = {label for _, label in self._lines.makers}
        counts = Counter(part for label in names_of_all for part in set(label.split(".")))
        return {part for name in names for part in name.split(".") if 2 * counts[part] < len(names_of_all)}

    def _list_met(self, at: At | None) -> tuple[list[At], list[At]]:
        """Return the last collectives that a value passed, and the operators after them."""

        def reads(op: At) -> list[At]:
            taken = self._joint.reads(op) if self._joint.op(op).meeting is None else ()
            return list_of_step(self._joint, [each for each in taken if self._joint.value(each).is_floating])

        starts = map(self._joint.maker, list_of_step(self._joint, [] if at is None else [at]))
        ops = list(walk_back(self._joint, starts, reads, _MOST_FOLLOWED))
        met = [op for op in ops if self._joint.op(op).meeting is not None]
        return met, [op for op in ops if op not in met]
