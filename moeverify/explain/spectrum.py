"""Lines that right results of the same kind have passed and a wrong result has not, or the other way round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import list_of_step, walk_back
from moeverify.explain.joint import At, Joint
from moeverify.explain.program import Site, list_numbers
from moeverify.explain.sites import is_of_user
from moeverify.explain.suspects import Target
from moeverify.explain.user_lines import UserLines, make_origin
from moeverify.results.checks import Kind
from moeverify.results.culprit import Origin

_WITH_NUMBERS = frozenset({"add", "div", "mul", "sub"})
_OF_OPTIMIZER = frozenset({Kind.OPTIMIZER_STATE, Kind.UPDATE, Kind.WEIGHT})
_MOST_FOLLOWED = 48
"""Maximum number of operators that are followed upstream."""


class Spectrum:
    """Comparison of the lines that a wrong result has passed with those of `right` results.

    `list_lineage` returns the operators that carried a value, the last one first.
    """

    def __init__(
        self,
        joint: Joint,
        lines: UserLines,
        right: Sequence[Target],
        list_lineage: Callable[[At | None], Sequence[At]],
    ) -> None:
        self._joint, self._lines, self._right = joint, lines, right
        self._list_lineage = list_lineage

    def _list_right(self, cause: OperatorCause) -> list[Target]:
        """Return the right results of the kind of a wrong one."""
        kind, rank = cause.targets[0].mark[1], cause.ops[0][0]
        return [each for each in self._right if each.mark[1] == kind and rank in each.values]

    def _list_alike(self, cause: OperatorCause) -> list[Target]:
        """Return the right results of the kind of a wrong one that a rank holds in the same way, whole or not."""
        target, rank = cause.targets[0], cause.ops[0][0]
        is_whole = rank in target.regions and target.regions[rank].is_whole
        return [each for each in self._list_right(cause) if each.regions[rank].is_whole == is_whole]

    def list_alone(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield the lines of ranks alone that the wrong result passes and no right one of its kind does.

        These are collectives and computations with a number, the last one first. Nothing without right results.
        """
        target, rank = cause.targets[0], cause.ops[0][0]
        right = self._list_right(cause)
        passed = {sites[:1] for each in right for _, sites in self._list_passed(each, rank)}
        for op, sites in self._list_passed(target, rank) if right else ():
            is_new = bool(sites) and sites[:1] not in passed and self._lines.is_parallel(sites[0])
            if is_new and (self._joint.op(op).meeting is not None or self._has_number(op)):
                yield make_origin("alone", sites)

    def _has_number(self, op: At) -> bool:
        """Return whether an operator adds a number to each element, or multiplies by it."""
        recorded = self._joint.op(op)
        return recorded.short.rstrip("_") in _WITH_NUMBERS and bool(list_numbers(recorded.args))

    def _list_passed(self, target: Target, rank: int) -> list[tuple[At, tuple[Site, ...]]]:
        """Return the operators that carried the value of a result, with their lines of user code."""
        return [(op, self._lines.sites(op)) for op in self._list_lineage(target.values.get(rank))]

    def list_unwritten(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield the line after the passes that writes most right results of this kind, and not the wrong one.

        Then its conditions, and those of the lists that it takes. Nothing for other results of the passes.
        """
        target, rank = cause.targets[0], cause.ops[0][0]
        right = self._list_right(cause) if target.mark[1] in (*_OF_OPTIMIZER, Kind.GRADIENT) else []
        written = [self._find_writer(each, rank) for each in right]
        mine = {sites for _, sites in self._list_passed(target, rank)}
        for sites, count in Counter(filter(None, written)).most_common(1):
            if 2 * count > len(right) and sites not in mine:
                yield make_origin("missing", sites)
                yield from self._lines.list_deciding(sites)

    def _find_writer(self, target: Target, rank: int) -> tuple[Site, ...]:
        """Return the last line of user code that a result passes, a gradient after the passes, others in the step."""
        phase = "forward" if target.mark[1] == Kind.GRADIENT else "step"
        passed = self._list_passed(target, rank)
        return next((sites for op, sites in passed if sites and self._joint.op(op).phase == phase), ())

    def list_missing(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield a collective or setup line of right results of this kind that the wrong one has not passed.

        Most right results have passed it, or their computation shares a line with that of the wrong one. Results
        that a rank holds in the same way count first. For a multiple of the right result, a line of ranks alone
        that computes with numbers counts, too.
        """
        if cause.targets[0].mark[1] in _OF_OPTIMIZER and cause.known != "reduction":
            return  # collectives reduce gradients
        for right in (self._list_alike(cause), self._list_right(cause)):
            found = list(self._list_missing(cause, right))
            if found:
                yield from found
                return

    def _list_missing(self, cause: OperatorCause, right: Sequence[Target]) -> Iterator[Origin]:
        target, rank = cause.targets[0], cause.ops[0][0]
        if cause.known == "scale":
            yield from self._list_numbers(target, rank, right)
        if cause.known == "reduction":
            yield from self._list_carrying(target, rank, right)
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

    def _list_numbers(self, target: Target, rank: int, right: Sequence[Target]) -> Iterator[Origin]:
        """Yield the lines of ranks alone that most right results pass, with a number, and a wrong one does not."""
        mine = {sites[:1] for _, sites in self._list_passed(target, rank)}
        counts = Counter(
            sites[:1]
            for each in right
            for sites in {
                sites for op, sites in self._list_passed(each, rank) if sites and self._has_number(op)
            }
        )
        for sites, count in counts.most_common():
            if 2 * count > len(right) and sites not in mine and self._lines.is_parallel(sites[0]):
                yield make_origin("missing", sites)

    def _list_carrying(self, target: Target, rank: int, right: Sequence[Target]) -> Iterator[Origin]:
        """Yield a collective that carried a right gradient and not the wrong one, and its conditions.

        Collectives after the backward pass come first: during it, they may carry gradients of activations.
        """
        mine = {sites[:1] for _, sites in self._list_passed(target, rank)}
        found = {
            op: each
            for each in right
            for op, sites in self._list_passed(each, rank)
            if self._joint.op(op).meeting is not None and sites and sites[:1] not in mine
        }
        for op in sorted(found, key=lambda op: self._joint.op(op).phase == "backward")[:1]:
            yield from self._describe(op, self._list_words(target.mark[2], found[op].mark[2]))

    def _describe(self, op: At, words: Collection[str]) -> Iterator[Origin]:
        """Yield the call of a collective, and the conditions of the call: lines with these words first."""
        recorded, stack = self._joint.op(op), self._lines.stack(op)
        if any(is_of_user(site.file) for site in recorded.sites):
            yield make_origin("missing", stack)
            program = self._joint.programs[op[0]]
            sites = program.ops[recorded.origin].sites if recorded.origin >= 0 else self._lines.sites(op)
            yield from self._lines.list_members(sites, words)
            yield from self._lines.define(sites, of_conditions=True, words=words)

    def _list_words(self, *names: str) -> set[str]:
        """Return the parts of names of tensors that most tensors do not have in theirs."""
        names_of_all = {label for _, label in self._lines.makers}
        counts = Counter(part for label in names_of_all for part in set(label.split(".")))
        return {part for name in names for part in name.split(".") if 2 * counts[part] < len(names_of_all)}

    def _list_met(self, at: At | None) -> tuple[list[At], list[At]]:
        """Return the last collectives that a value passed, and the operators after them."""
        is_number = at is not None and not self._joint.value(at).shape

        def reads(op: At) -> list[At]:
            taken = self._joint.reads(op) if self._joint.op(op).meeting is None else ()
            values = [(each, self._joint.value(each)) for each in taken]
            # Numbers that scale all results, such as the coefficient of a clip, are another result.
            kept = [each for each, value in values if value.is_floating and (is_number or value.shape)]
            return list_of_step(self._joint, kept)

        starts = map(self._joint.maker, list_of_step(self._joint, [] if at is None else [at]))
        ops = list(walk_back(self._joint, starts, reads, _MOST_FOLLOWED))
        met = [op for op in ops if self._joint.op(op).meeting is not None]
        return met, [op for op in ops if op not in met]
