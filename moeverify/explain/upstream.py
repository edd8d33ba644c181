"""Lines of the user's code from which a wrong result comes: sources of its operands, groups and numbers."""

from __future__ import annotations

import itertools
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.cause import Cause
from moeverify.explain.chains import is_of_masks
from moeverify.explain.compare import is_right
from moeverify.explain.content import is_move
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.definitions import Definitions
from moeverify.explain.describe import make_line
from moeverify.explain.joint import At
from moeverify.explain.program import HIDDEN, Op, Ref, Site, list_numbers
from moeverify.explain.sites import is_own
from moeverify.explain.suspects import Target
from moeverify.results.culprit import Origin, OriginKind

_MOST = 3
_MASK_DEPTH = 16
_MOST_BLOCKS = 64
_MOST_FOLLOWED = 48
"""Maximum number of operators that are followed upstream."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Upstream:
    """Search for the lines that come before the first wrong operation. `right` are results that are right."""

    def __init__(self, alignment: Alignment, one: OneDevice, right: Sequence[Target]) -> None:
        self._alignment, self._one, self._joint, self._right = alignment, one, alignment.joint, right

    def find(
        self,
        cause: Cause,
        taken: Sequence[At] = (),
        named: Collection[tuple[str, int]] = (),
        *,
        defines: bool = True,
    ) -> tuple[Origin, ...]:
        """Return at most three lines, those that differ from one device first.

        `taken` are wrong operands of the first operation; else all of its operands count. Lines that are
        `named` already are left out. `defines` adds definitions of Python values that the operation takes.
        """
        lineage = self._list_lineage(cause)
        # Lines that differ come first; parts of a wrong sum are right. Else groups, numbers and flags are in doubt.
        sources = (
            self._list_cuts(cause),
            self._list_scaling(cause, lineage) if cause.known == "scale" else (),
            self._list_values(cause, taken),
            self._list_scaling(cause, lineage),
            self._list_parts(taken) if cause.repairs and cause.repairs[0].kind == "total" else (),
            self._list_missing(cause),
        )
        found = () if cause.sums else self._choose(named, *sources)
        is_met = self._joint.op(cause.ops[0]).meeting is not None
        return found or self._choose(
            named,
            self._list_applied(cause),
            self._list_groups(cause, lineage) if cause.known or is_met else (),
            self._list_definitions(cause.ops[0]) if defines else (),
            self._list_entered(cause.ops[0]),
        )

    def _choose(self, named: Collection[tuple[str, int]], *sources: Iterable[Origin]) -> tuple[Origin, ...]:
        """Return the first origins of several sources, one for each line that is not named already."""
        found: dict[tuple[str, int], Origin] = {}
        for origin in itertools.chain(*sources):
            place = (origin.line.file, origin.line.line)
            if place not in named:
                found.setdefault(place, origin)
            if len(found) == _MOST:
                break
        return tuple(found.values())

    def find_made(self, op: At) -> tuple[Origin, ...]:
        """Return the line of user code that made a tensor before the first step, and definitions of its part."""
        sites = self._sites(op)
        if not sites:
            return ()
        return (_origin("made", sites), *self._define(sites))[:_MOST]

    def _sites(self, op: At) -> tuple[Site, ...]:
        """Return the lines of the user's code that call an operator, the innermost first."""
        program = self._joint.programs[op[0]]
        return tuple(site for site in program.sites_of(self._joint.op(op)) if _is_of_user(site.file))

    def _list_entered(self, op: At) -> Iterator[Origin]:
        """Yield the innermost call that one device does not run, if one device runs the operation's own line."""
        sites = self._joint.programs[op[0]].sites_of(self._joint.op(op))
        known = {(site.file, site.line) for each in self._one.program.ops for site in each.sites}
        first = next((at for at, site in enumerate(sites) if (site.file, site.line) not in known), 0)
        # Without user code on the stack, the model and the layout are those of this package.
        if first and (_is_of_user(sites[first].file) or not self._sites(op)):
            yield _origin("entered", sites[first:])

    def _list_lineage(self, cause: Cause) -> list[At]:
        """Return the operators of the step that carried the value of a wrong result, the last one first.

        These are its copies, sums and multiples.
        """
        target, rank = cause.targets[0], cause.ops[0][0]
        end = target.values.get(rank)
        if end is None:
            return []
        roots = self._roots(end)
        found: dict[At, None] = {}
        waiting = [end]
        while waiting and len(found) < _MOST_FOLLOWED:
            op = self._joint.maker(waiting.pop(0))
            if op in found or self._joint.op(op).step < 0:
                continue
            found[op] = None
            for at in self._joint.reads(op):
                mine = self._roots(at)
                is_same = not (roots and mine) or not roots.isdisjoint(mine)
                if at[0] == rank and self._joint.value(at).is_floating and is_same:
                    waiting.append(at)
        return list(found)

    def _roots(self, at: At) -> set[int]:
        known = self._alignment.find(at)
        return set() if known is None or known.ids is None else set(self._one.roots(known.ids))

    def _list_cuts(self, cause: Cause) -> Iterator[Origin]:
        """Yield calls of `detach` through which one device passes a gradient, for a wrong gradient."""
        target, rank = cause.targets[0], cause.ops[0][0]
        program = self._joint.programs[rank]
        if self._joint.op(cause.ops[0]).phase != "backward" and target.mark[1] != "gradient":
            return
        usual = {sites[:1] for _, _, sites in self._one.program.cuts}
        labels = {value.number for value in program.values if value.label and value.label == target.mark[2]}
        for number, value, sites in program.cuts:
            is_here = number < len(program.ops) and program.ops[number].step == target.mark[0]
            if not (is_here and sites and _is_of_user(sites[0].file)) or sites[:1] in usual:
                continue
            before = self._joint.list_before([(rank, value)])
            if not labels or any((rank, program.values[each].op) in before for each in labels):
                yield _origin("cut", sites)

    def _list_values(self, cause: Cause, taken: Sequence[At]) -> Iterator[Origin]:
        """Yield the first operators whose integers, masks and numbers are not those of one device."""
        first = cause.ops[0]
        seen: set[At] = set()
        waiting = list(taken or [at for at in self._joint.reads(first) if at[0] == first[0]])
        while waiting and len(seen) < _MOST_FOLLOWED:
            at = waiting.pop(0)
            op = self._joint.maker(at)
            if op in seen:
                continue
            seen.add(op)
            if self._joint.op(op).step < 0 or self._agrees(at):
                continue
            reads = [each for each in self._joint.reads(op) if each[0] == op[0]]
            wrong = [each for each in reads if not self._agrees(each)]
            sites = self._sites(op)
            if not wrong and sites and op != first and self._joint.op(op).short not in HIDDEN:
                yield _origin("value" if self._is_on_one_device(at) else "extra", sites)
                if _has_numbers(self._joint.op(op)):
                    yield from self._define(sites)
            waiting += wrong

    def _is_on_one_device(self, at: At) -> bool:
        return bool(self._alignment.list_counterparts(at))

    def _agrees(self, at: At) -> bool:
        """Return whether a value is one that the same line computes on one device, or a right one.

        It may be a block of it, or add up to it over the ranks.
        """
        data = self._alignment.data(at)
        if data is None or not data.numel() or self._joint.value(at).label:
            return True
        if self._alignment.tells(at) and not is_of_masks(self._joint, at, _MASK_DEPTH):
            return self._alignment.is_right(at)
        theirs = [self._one.data(number) for number in self._alignment.list_counterparts(at)]
        right = [each for each in theirs if each is not None]
        if not right:
            return self._alignment.is_right(at)
        if any(_is_block(data, each) is not False for each in right):
            return True
        return self._adds_up(at, data, right)

    def _adds_up(self, at: At, data: Tensor, right: Sequence[Tensor]) -> bool:
        """Return whether the values of this line add up to those of one device, or to a known multiple."""
        same = [each for each in right if each.shape == data.shape]
        # Only gradients of a loss may be multiples: its scale depends on the number of ranks.
        is_gradient = self._joint.op(self._joint.maker(at)).phase != "forward"
        scales = self._alignment.scales if is_gradient else (1.0,)
        if any(is_right(data, each * scale) for each in same for scale in scales if each.is_floating_point()):
            return True
        parts = [self._alignment.data(each) for each in self._alignment.siblings(at)]
        if not data.is_floating_point() or any(each is None or each.shape != data.shape for each in parts):
            return False
        total = torch.stack([each for each in parts if each is not None]).sum(0)
        whole = torch.stack(same or [total * 0]).sum(0)
        return any(is_right(total, whole * scale) for scale in scales)

    def _list_scaling(self, cause: Cause, lineage: Sequence[At]) -> Iterator[Origin]:
        """Yield operators that multiply by numbers, for a multiple of a right result or parts of unequal weight."""
        first = cause.ops[0]
        uneven = [at for at in self._joint.reads(first) if len(self._list_scales(at)) > 1]
        if cause.known != "scale" and not uneven:
            return
        ops = lineage if cause.known == "scale" else []
        users: dict[At, tuple[Site, ...]] = {}
        for op in [*ops, *self._list_multiplied(first, uneven)]:
            sites = self._sites(op)
            if (
                sites
                and sites not in users.values()
                and self._multiplies(op)
                and not self._has_same_numbers(op)
            ):
                users[op] = sites
        own = [sites for op, sites in users.items() if op in ops]
        others = [sites for op, sites in users.items() if op not in ops]
        yield from (_origin("number", sites) for sites in own)
        for sites in [*others, *own]:
            yield _origin("number", sites)
            yield from self._define(sites)

    def _list_scales(self, at: At) -> set[float]:
        """Return the factors of the values that one line computes on all ranks and in all micro-batches."""
        known = [self._alignment.find(each) for each in self._alignment.siblings(at)]
        return {float(f"{each.scale:.6g}") for each in known if each is not None}

    def _list_multiplied(self, first: At, uneven: Sequence[At]) -> list[At]:
        """Return the operators of the backward pass before an operation, the nearest to the loss first."""
        joint, before = self._joint, self._joint.list_before(uneven or self._joint.reads(first))
        own = self._joint.op(first)
        found = [
            op
            for op in before
            if op[0] == first[0] and (joint.op(op).step, joint.op(op).phase) == (own.step, "backward")
        ]
        return sorted(found, key=joint.place)

    def _multiplies(self, op: At) -> bool:
        """Return whether an operator computes each element of its result from an element and a number."""
        recorded = self._joint.op(op)
        if len(recorded.args) < 2 or not isinstance(recorded.args[0], Ref) or is_move(recorded):
            return False
        own = [self._joint.value((op[0], number)) for number in recorded.results]
        taken = self._joint.value((op[0], recorded.args[0].number))
        is_same = all(each.alias < 0 and each.shape == taken.shape for each in own)
        return is_same and type(recorded.args[1]) in (int, float)

    def _has_same_numbers(self, op: At) -> bool:
        """Return whether one device passes the same numbers to an operator of this place."""
        results = self._joint.op(op).results
        theirs = self._alignment.list_counterparts((op[0], results[0])) if results else []
        numbers = list_numbers(self._joint.op(op).args)
        return any(numbers == list_numbers(self._one.program.op_of(each).args) for each in theirs)

    def _list_parts(self, taken: Sequence[At]) -> Iterator[Origin]:
        """Yield the operators that passed on a part of a sum without a reduction, the last one first."""
        waiting, seen = list(taken), set(taken)
        while waiting and len(seen) < _MOST_FOLLOWED:
            at = waiting.pop(0)
            known = self._alignment.find(at)
            op = self._joint.maker(at)
            if known is None or not known.over or self._joint.op(op).meeting is not None:
                continue
            if sites := self._sites(op):
                yield _origin("part", sites)
            reads = [each for each in self._joint.reads(op) if self._joint.value(each).is_floating]
            waiting += [each for each in reads if each not in seen]
            seen.update(reads)

    def _list_missing(self, cause: Cause) -> Iterator[Origin]:
        """Yield the collective that most right results of this kind have passed, if the wrong one has not."""
        target, rank = cause.targets[0], cause.ops[0][0]
        right = [each for each in self._right if each.mark[1] == target.mark[1] and rank in each.values]
        mine = {sites for sites, _ in self._list_met(target.values.get(rank))}
        counts: Counter[tuple[Site, ...]] = Counter()
        groups: dict[tuple[Site, ...], str] = {}
        for each in right:
            for sites, group in self._list_met(each.values[rank]):
                counts[sites] += 1
                groups[sites] = group
        for sites, count in counts.most_common(1):
            if 2 * count > len(right) and sites not in mine:
                if sites:
                    yield _origin("missing", sites)
                else:
                    yield from self._list_calls(rank, groups[sites])

    def _list_met(self, at: At | None) -> list[tuple[tuple[Site, ...], str]]:
        """Return the last collectives that a value passed: their lines in user code, and their groups."""
        found: list[tuple[tuple[Site, ...], str]] = []
        waiting: list[At] = [] if at is None else [at]
        seen: set[At] = set()
        while waiting and len(seen) < _MOST_FOLLOWED:
            op = self._joint.maker(waiting.pop(0))
            recorded = self._joint.op(op)
            if op in seen or recorded.step < 0:
                continue
            seen.add(op)
            if recorded.meeting is not None:
                found.append((self._sites(op)[:1], recorded.meeting.group.name))
                continue
            waiting += [each for each in self._joint.reads(op) if self._joint.value(each).is_floating]
        return found

    def _list_applied(self, cause: Cause) -> Iterator[Origin]:
        """Yield where the forward pass applies the function whose backward calls the operation."""
        op = self._joint.op(cause.ops[0])
        if op.phase == "backward" and op.sites and op.origin >= 0:
            sites = self._joint.programs[cause.ops[0][0]].ops[op.origin].sites
            users = [site for site in sites if _is_of_user(site.file) and site.file != op.sites[0].file]
            if users:
                yield _origin("applied", users)

    def _list_groups(self, cause: Cause, lineage: Iterable[At]) -> Iterator[Origin]:
        """Yield the collectives that reduced a wrong result, and where their groups come from."""
        for op in dict.fromkeys([*cause.ops[:1], *lineage]):
            meeting = self._joint.op(op).meeting
            if meeting is not None:
                sites = self._sites(op)
                if sites:
                    yield _origin("collective", sites)
                yield from itertools.islice(self._list_calls(op[0], meeting.group.name), 1 if sites else None)
                if sites:
                    yield from self._define(sites)

    def _list_calls(self, rank: int, group: str) -> Iterator[Origin]:
        for sites in self._joint.programs[rank].groups.get(group, ()):
            if _is_of_user(sites[0].file):
                yield _origin("group", sites)

    def _list_definitions(self, first: At) -> Iterator[Origin]:
        """Yield the lines that define the numbers and flags of an operation; nothing for a derivative."""
        recorded = self._joint.op(first)
        if recorded.sites and (sites := self._sites(first)):
            yield from self._define(sites, is_of_tensors=not _has_numbers(recorded))

    def _define(self, sites: tuple[Site, ...], *, is_of_tensors: bool = False) -> Iterator[Origin]:
        for site in self._definitions.find(sites, is_of_tensors=is_of_tensors):
            yield _origin("definition", [site])

    @cached_property
    def _definitions(self) -> Definitions:
        files: set[str] = set()
        made: set[tuple[str, int]] = set()
        read: set[tuple[str, int]] = set()
        for program in self._joint.programs:
            for op in program.ops:
                users = [site for site in op.sites if _is_of_user(site.file)]
                files.update(site.file for site in users)
                if users and op.short not in HIDDEN:
                    (made if op.scalar is None else read).add((users[0].file, users[0].line))
                if op.step >= 0 and any(program.values[number].is_floating for number in op.results):
                    made.update((site.file, site.line) for site in users)
            files.update(site.file for calls in program.groups.values() for site in calls[0])
        # A line that makes tensors is in the recorded program, if it does not read a number of one.
        return Definitions(filter(_is_of_user, files), lambda *line: line in made and line not in read)


def _is_block(mine: Tensor, theirs: Tensor) -> bool | None:
    """Return whether a tensor is one of the equal blocks of another; None if it cannot be one."""
    if mine.ndim != theirs.ndim or any(b % a for a, b in zip(mine.shape, theirs.shape, strict=True)):
        return None
    sizes = zip(mine.shape, theirs.shape, strict=True)
    places = itertools.product(*(range(0, whole, part) for part, whole in sizes))
    for place in itertools.islice(places, _MOST_BLOCKS):
        block = theirs
        for dim, start in enumerate(place):
            block = block.narrow(dim, start, mine.shape[dim])
        if is_right(mine, block) if mine.is_floating_point() else torch.equal(mine, block):
            return True
    return False


def _has_numbers(op: Op) -> bool:
    """Return whether an operator takes numbers other than sizes, or a process group."""
    return op.meeting is not None or any(isinstance(each, int | float) for each in op.args)


def _origin(kind: OriginKind, sites: Sequence[Site]) -> Origin:
    callers = [site for site in sites[1:] if _is_of_user(site.file)][:1]
    return Origin(kind=kind, line=make_line(sites[0]), caller=make_line(callers[0]) if callers else None)


def _is_of_user(file: str) -> bool:
    """Return whether a file belongs neither to this package nor to a library."""
    return not (file.startswith(("<", *_LIBRARIES)) or is_own(Site(file, 0, "")))
