"""Lines of the user's code from which a wrong result comes: sources of its operands, groups and numbers."""

from __future__ import annotations

import itertools
import linecache
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

import torch

from moeverify.explain.agreement import Agreement
from moeverify.explain.align import Alignment, Known
from moeverify.explain.cause import Cause
from moeverify.explain.chains import list_chain, skip_moves
from moeverify.explain.content import is_move
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.definitions import Definitions, make_definitions
from moeverify.explain.describe import make_line
from moeverify.explain.joint import At
from moeverify.explain.program import HIDDEN, Op, Ref, Site, list_numbers
from moeverify.explain.sites import is_of_user
from moeverify.explain.suspects import Target
from moeverify.results.culprit import Origin, OriginKind

_MOST = 3
_NEAR = 2
"""Maximum distance, in lines, of definitions that are shown as one."""
_MOST_FOLLOWED = 48
"""Maximum number of operators that are followed upstream."""


class Upstream:
    """Search for the lines that come before the first wrong operation. `right` are results that are right."""

    def __init__(self, alignment: Alignment, one: OneDevice, right: Sequence[Target]) -> None:
        self._alignment, self._one, self._joint, self._right = alignment, one, alignment.joint, right
        self._agreement = Agreement(alignment, one)

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
            self._list_repeated(cause),
            self._list_received(cause.ops[0]) if defines else (),
            self._list_scaling(cause, lineage) if cause.known == "scale" else (),
            self._list_values(cause, taken),
            self._list_scaling(cause, lineage),
            self._list_parts(taken) if cause.repairs and cause.repairs[0].kind == "total" else (),
            self._list_missing(cause),
            self._list_read(taken),
        )
        found = () if cause.sums else self._choose(named, *sources)
        is_met = self._joint.op(cause.ops[0]).meeting is not None
        return found or self._choose(
            named,
            self._list_silent(cause) if defines or cause.known else (),
            self._list_applied(cause),
            self._list_groups(cause, lineage) if cause.known or is_met else (),
            self._list_definitions(cause.ops[0]) if defines else (),
            self._list_entered(cause.ops[0]),
            self._list_made(cause.ops[0][0], [cause.targets[0].mark[2]]) if defines or cause.known else (),
        )

    def _choose(self, named: Collection[tuple[str, int]], *sources: Iterable[Origin]) -> tuple[Origin, ...]:
        """Return the first origins of several sources, one for each line that is not named already."""
        found: dict[tuple[str, int], Origin] = {}
        for origin in itertools.chain(*sources):
            place = (origin.line.file, origin.line.line)
            # Definitions near a line that is shown are seen beside it.
            is_seen = origin.kind == "definition" and any(
                place[0] == file and abs(place[1] - line) <= _NEAR for file, line in found
            )
            if place not in named and not is_seen:
                found.setdefault(place, origin)
            if len(found) == _MOST:
                break
        return tuple(found.values())

    def find_made(self, op: At) -> tuple[Origin, ...]:
        """Return the line of user code that made a tensor before the first step, and definitions of its part."""
        return tuple(itertools.islice(self._describe_made(op), _MOST))

    def _describe_made(self, op: At) -> Iterator[Origin]:
        """Yield the line of user code that made a tensor before the first step, and definitions of its part."""
        sites = self._made_at(op)
        if sites:
            yield _origin("made", sites)
            yield from self._define(sites)

    def _made_at(self, op: At) -> tuple[Site, ...]:
        """Return the lines that made a tensor before the first step, of which this operator may take a view."""
        program = self._joint.programs[op[0]]
        bases = [program.base(number).op for number in self._joint.op(op).results[:1]]
        return next(filter(None, (self._sites((op[0], each)) for each in (op[1], *bases))), ())

    def _list_made(self, rank: int, labels: Iterable[str]) -> Iterator[Origin]:
        for label in labels:
            if (op := self._makers.get((rank, label))) is not None:
                yield from self._describe_made(op)

    @cached_property
    def _makers(self) -> dict[tuple[int, str], At]:
        """The operator that made each named tensor before the first step, by rank and name."""
        return {
            (rank, value.label): (rank, value.op)
            for rank, program in enumerate(self._joint.programs)
            for value in program.values
            if value.label and program.ops[value.op].step < 0
        }

    def _list_read(self, taken: Sequence[At]) -> Iterator[Origin]:
        """Yield the lines that made the weights from which a wrong operand is computed, if ranks alone run them."""
        program = self._one.program
        for at in taken:
            labels = {
                program.base(number).label
                for root in self._roots(at)
                for number in program.op_of(root).reads()
            }
            for label in sorted(labels):
                op = self._makers.get((at[0], label))
                if op is not None and any(map(self._is_parallel, self._made_at(op)[:1])):
                    yield from self._describe_made(op)

    def _list_received(self, first: At) -> Iterator[Origin]:
        """Yield the collectives whose results an operation takes directly."""
        for at in self._joint.reads(first):
            before = [*list_chain(self._joint, [at]), self._joint.maker(skip_moves(self._joint, at))]
            met = [op for op in before if self._joint.op(op).meeting is not None]
            for op in met[:1]:
                is_own = op[0] == first[0] and self._joint.op(op).phase == self._joint.op(first).phase
                if is_own and any(is_of_user(site.file) for site in self._joint.op(op).sites):
                    yield _origin("collective", self._sites(op))

    def _list_repeated(self, cause: Cause) -> Iterator[Origin]:
        """Yield the first collectives of a backward pass that add values which are equal on all of their ranks."""
        target, rank = cause.targets[0], cause.ops[0][0]
        end = target.values.get(rank)
        if end is None or target.mark[1] == "loss":
            return
        ops = [op for op in self._joint.list_before([end]) if op[0] == rank]
        for op in sorted(ops, key=self._joint.place):
            recorded = self._joint.op(op)
            if recorded.meeting is None or recorded.phase != "backward" or recorded.step != target.mark[0]:
                continue
            taken = [self._alignment.find(at) for at in self._joint.reads(op) if at[0] == rank]
            made = [self._alignment.find((rank, number)) for number in recorded.results]
            num_ranks = len(recorded.meeting.group.ranks)
            if any(_is_multiple(one, two, num_ranks) for one, two in zip(taken, made, strict=False)):
                yield _origin("repeated", self._stack(op) or self._sites(op))

    def _list_silent(self, cause: Cause) -> Iterator[Origin]:
        """Yield the lines of a step that only ranks execute and that run no operator, if there are few."""
        rank, step = cause.ops[0][0], cause.targets[0].mark[0]
        program = self._joint.programs[rank]
        heard = {(site.file, site.line) for op in program.ops for site in op.sites}
        lines = program.lines.get(step, set()) - self._one_lines - heard
        # Of lines one after another, the first.
        firsts = sorted((file, line) for file, line in lines if (file, line - 1) not in lines)
        if len(firsts) <= _MOST:
            yield from (_origin("silent", [Site(*line, "")]) for line in firsts)

    def _is_parallel(self, site: Site) -> bool:
        """Return whether ranks execute a line and one device does not."""
        return (site.file, site.line) in self._rank_lines

    @cached_property
    def _one_lines(self) -> set[tuple[str, int]]:
        return set().union(*self._one.program.lines.values())

    @cached_property
    def _rank_lines(self) -> set[tuple[str, int]]:
        lines = (each for program in self._joint.programs for each in program.lines.values())
        return set().union(*lines) - self._one_lines

    def _sites(self, op: At) -> tuple[Site, ...]:
        """Return the lines of the user's code that call an operator, the innermost first."""
        program = self._joint.programs[op[0]]
        return tuple(site for site in program.sites_of(self._joint.op(op)) if is_of_user(site.file))

    def _list_entered(self, op: At) -> Iterator[Origin]:
        """Yield the innermost call that one device does not run, if one device runs the operation's own line."""
        sites = self._joint.programs[op[0]].sites_of(self._joint.op(op))
        known = {(site.file, site.line) for each in self._one.program.ops for site in each.sites}
        first = next((at for at, site in enumerate(sites) if (site.file, site.line) not in known), 0)
        # Without user code on the stack, the model and the layout are those of this package.
        if first and (is_of_user(sites[first].file) or not self._sites(op)):
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
            if not (is_here and sites and is_of_user(sites[0].file)) or sites[:1] in usual:
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
            if self._joint.op(op).step < 0 or self._agreement.agrees(at):
                continue
            reads = [each for each in self._joint.reads(op) if each[0] == op[0]]
            wrong = [each for each in reads if not self._agreement.agrees(each)]
            sites = self._sites(op)
            if not wrong and sites and op != first and self._joint.op(op).short not in HIDDEN:
                yield _origin("value" if self._agreement.is_on_one_device(at) else "extra", sites)
                if _has_numbers(self._joint.op(op)):
                    yield from self._define(sites)
            waiting += wrong

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
        """Return whether one device passes the same numbers to an operator of this place, on all ranks."""
        results = self._joint.op(op).results
        if not results:
            return False
        place = (op[0], results[0])
        theirs = [self._one.program.op_of(each) for each in self._alignment.list_counterparts(place)]
        mine = [self._joint.op(self._joint.maker(each)) for each in self._alignment.siblings(place)]
        right = [list_numbers(each.args) for each in theirs]
        return all(list_numbers(each.args) in right for each in mine)

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
        """Yield a collective or setup line of right results of this kind that the wrong one has not passed.

        Most right results have passed it, or their computation shares a line with that of the wrong one.
        """
        target, rank = cause.targets[0], cause.ops[0][0]
        right = [each for each in self._right if each.mark[1] == target.mark[1] and rank in each.values]
        met, before = self._list_met(target.values.get(rank))
        mine = {self._stack(op)[:2] for op in met}
        near = {(site.file, site.line) for op in before for site in self._stack(op)[:1]}
        counts: Counter[tuple[Site, ...]] = Counter()
        found: dict[tuple[Site, ...], tuple[At, Target]] = {}
        for each in right:
            for op in self._list_met(each.values[rank])[0]:
                sites = self._stack(op)[:2]
                is_near = any((site.file, site.line) in near for site in sites[1:])
                counts[sites] += len(right) if is_near else 1
                found[sites] = op, each
        for sites, count in counts.most_common(1):
            if 2 * count > len(right) and sites not in mine:
                op, each = found[sites]
                shown = list(self._describe_missing(op, self._list_words(target.mark[2], each.mark[2])))
                yield from shown
                if shown:
                    return
        makers = {each.mark[2]: self._makers.get((rank, each.mark[2])) for each in (target, *right)}
        made = {name: self._made_at(op)[:1] for name, op in makers.items() if op is not None}
        for sites, count in Counter(filter(None, made.values())).most_common(1):
            if 2 * count > len(right) and not made.get(target.mark[2]):
                yield _origin("missing", sites)

    def _describe_missing(self, op: At, words: Collection[str]) -> Iterator[Origin]:
        """Yield the call of a collective, and the conditions of the call: lines with these words first."""
        recorded, stack = self._joint.op(op), self._stack(op)
        if any(is_of_user(site.file) for site in recorded.sites):
            yield _origin("missing", stack)
            program = self._joint.programs[op[0]]
            sites = program.ops[recorded.origin].sites if recorded.origin >= 0 else self._sites(op)
            yield from self._define(sites, of_conditions=True, words=words)
        elif recorded.meeting is not None and not stack:
            yield from self._list_calls(op[0], recorded.meeting.group.name)

    def _list_words(self, *names: str) -> set[str]:
        """Return the parts of names of tensors that most tensors do not have in theirs."""
        names_of_all = {label for _, label in self._makers}
        counts = Counter(part for label in names_of_all for part in set(label.split(".")))
        return {part for name in names for part in name.split(".") if 2 * counts[part] < len(names_of_all)}

    def _stack(self, op: At) -> tuple[Site, ...]:
        """Return the lines of user code that call an operator, and those of its forward operator in other files."""
        recorded, own = self._joint.op(op), self._sites(op)
        if recorded.origin < 0 or not own:
            return own
        sites = self._joint.programs[op[0]].ops[recorded.origin].sites
        return own[:1] + tuple(each for each in sites if is_of_user(each.file) and each.file != own[0].file)

    def _list_met(self, at: At | None) -> tuple[list[At], list[At]]:
        """Return the last collectives that a value passed, and the operators after them."""
        met: list[At] = []
        after: list[At] = []
        waiting: list[At] = [] if at is None else [at]
        while waiting and len(met) + len(after) < _MOST_FOLLOWED:
            op = self._joint.maker(waiting.pop(0))
            recorded = self._joint.op(op)
            if op in met or op in after or recorded.step < 0:
                continue
            if recorded.meeting is not None:
                met.append(op)
                continue
            after.append(op)
            waiting += [each for each in self._joint.reads(op) if self._joint.value(each).is_floating]
        return met, after

    def _list_applied(self, cause: Cause) -> Iterator[Origin]:
        """Yield where the forward pass applies the function whose backward calls the operation."""
        op = self._joint.op(cause.ops[0])
        if op.phase == "backward" and op.sites and op.origin >= 0:
            sites = self._joint.programs[cause.ops[0][0]].ops[op.origin].sites
            users = [site for site in sites if is_of_user(site.file) and site.file != op.sites[0].file]
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
            if is_of_user(sites[0].file):
                yield _origin("group", sites)

    def _list_definitions(self, first: At) -> Iterator[Origin]:
        """Yield the lines that define the numbers and flags of an operation; nothing for a derivative."""
        recorded = self._joint.op(first)
        if recorded.sites and (sites := self._sites(first)):
            yield from self._define(sites, is_of_tensors=not _has_numbers(recorded))

    def _define(
        self,
        sites: tuple[Site, ...],
        *,
        is_of_tensors: bool = False,
        of_conditions: bool = False,
        words: Collection[str] = (),
    ) -> Iterator[Origin]:
        """Yield definitions of the arguments of a call: first those with these words, then those of ranks alone."""
        found = self._definitions.find(sites, is_of_tensors=is_of_tensors, of_conditions=of_conditions)

        def rank_of(site: Site) -> tuple[bool, bool]:
            text = linecache.getline(site.file, site.line)
            is_named = any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)
            return not is_named, not self._is_parallel(site)

        yield from (_origin("definition", [site]) for site in sorted(found, key=rank_of))

    @cached_property
    def _definitions(self) -> Definitions:
        return make_definitions(self._joint.programs)


def _has_numbers(op: Op) -> bool:
    """Return whether an operator takes numbers other than sizes, or a process group."""
    return op.meeting is not None or any(isinstance(each, int | float) for each in op.args)


def _is_multiple(one: Known | None, two: Known | None, factor: float) -> bool:
    """Return whether a value has the same elements as another one, which are no parts, times a factor."""
    if one is None or two is None or one.over or two.over or one.ids is None or two.ids is None:
        return False
    return torch.equal(one.ids, two.ids) and math.isclose(two.scale, one.scale * factor)


def _origin(kind: OriginKind, sites: Sequence[Site]) -> Origin:
    callers = [site for site in sites[1:] if is_of_user(site.file)][:1]
    return Origin(kind=kind, line=make_line(sites[0]), caller=make_line(callers[0]) if callers else None)
