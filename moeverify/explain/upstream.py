"""Lines of the user's code from which a wrong result comes: sources of its operands, groups and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from moeverify.cases.axes.groups import AND
from moeverify.explain.agreement import Agreement
from moeverify.explain.branches import Branches
from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import (
    LINEAR,
    is_passing,
    list_chain,
    list_of_step,
    multiplies,
    skip_moves,
    walk_back,
)
from moeverify.explain.copies import list_copies
from moeverify.explain.divergences import Divergences, has_numbers
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import At
from moeverify.explain.known import Known
from moeverify.explain.operators import is_draw
from moeverify.explain.peers import RING
from moeverify.explain.program import Op
from moeverify.explain.scaling import Scaling
from moeverify.explain.sites import find_line, is_of_user
from moeverify.explain.spectrum import Spectrum
from moeverify.explain.user_lines import UserLines, keep_different, make_origin
from moeverify.results.checks import Kind
from moeverify.results.culprit import Origin

_MOST = 3
_MOST_NEAR = 48
"""Maximum number of operators of a backward pass among which user code is looked for."""
_MOST_PARTS = 1000
"""Maximum number of operators through which parts of a sum are followed."""
_NEAR = 2
"""Maximum distance, in lines, of definitions that are shown as one."""
_CARRYING = LINEAR | {"copy"}
"""Operators that carry a value, such as the division by the coefficient of a clip, to one with other roots."""
_MOST_FOLLOWED = 48
"""Maximum number of operators that are followed upstream."""


class Upstream:
    """Search for the lines that come before the first wrong operation, after the search of an `Explainer`."""

    def __init__(self, explainer: Explainer) -> None:
        alignment, one, right = explainer.alignment, explainer.one, explainer.right
        self._alignment, self._one, self._joint, self._right = alignment, one, alignment.joint, right
        self._agreement = Agreement(alignment, one)
        self._lines = UserLines(self._joint, one.program)
        self._scaling = Scaling(alignment, one, self._lines, right)
        self._branches = Branches(self._agreement, alignment, one.program, self._lines, explainer.independent)
        self._divergences = Divergences(alignment, self._agreement, self._lines)
        self._lineages: dict[At, list[At]] = {}
        self._spectrum = Spectrum(self._joint, self._lines, right, self._list_lineage)

    def find(
        self,
        cause: OperatorCause,
        taken: Sequence[At] = (),
        named: Collection[tuple[str, int]] = (),
        *,
        defines: bool = True,
        scaler: At | None = None,
        lacks: Sequence[Op] = (),
    ) -> tuple[Origin, ...]:
        """Return at most three lines, those that differ from one device first.

        `taken` are wrong operands of the first operation; else all of its operands count. Lines that are
        `named` already are left out. `defines` adds definitions of Python values that the operation takes.
        `scaler` is the operator that makes a value a multiple of the right one. `lacks` are operators that one device
        applies to a right value, and the rank does not.
        """
        kind = cause.repairs[0].kind if cause.repairs else ""
        if kind == "group":
            return self._choose(named, self._list_regrouped(cause), is_group=True)
        own = self._branches.find_maker(cause) if kind in ("operand", "whole") else None
        if own is not None and (own.file, own.line) not in named:
            return (make_origin("branch", [own]),)
        lineage = self._list_lineage(cause.targets[0].values.get(cause.ops[0][0]))
        # Lines that differ come first; parts of a wrong sum are right. Else groups, numbers and flags are in doubt.
        scaling = self._scaling.find(cause, lineage)
        sources = (
            self._list_draws(cause.ops[0]),
            self._lines.list_configuring(cause.ops[0]),
            self._list_by_kind(cause, kind),
            self._list_definitions(cause.ops[0]) if kind == "number" else (),
            self._list_definitions(scaler) if scaler and multiplies(self._joint, scaler) else (),
            self._list_copied(cause),
            self._list_lost(cause, lacks),
            self._list_cuts(cause),
            self._list_repeated(cause),
            self._list_overwritten(cause),
            self._list_unused(cause),
            self._spectrum.list_alone(cause) if cause.known else (),
            scaling if cause.known == "scale" else (),
            self._list_derivatives(cause.ops[0]) if cause.known in ("", "moved") else (),
            self._divergences.list_values(cause.ops[0], taken),
            scaling,
            self._list_parts(taken or self._joint.own_reads(cause.ops[0])) if not cause.known else (),
            self._spectrum.list_unwritten(cause),
            self._spectrum.list_missing(cause) if cause.known in ("reduction", "scale") else (),
        )
        branches = self._branches.list_nearest(cause)
        conditions = self._list_conditions(branches)
        found = self._choose(named, *(() if cause.sums else (*sources, conditions)), branches=branches)
        return found or self._choose(named, *self._list_fallbacks(cause, defines=defines))

    def _list_fallbacks(self, cause: OperatorCause, *, defines: bool) -> tuple[Iterable[Origin], ...]:
        """Return the lines to look at if no other line is known."""
        is_step = self._joint.op(cause.ops[0]).phase == "step"
        options = self._lines.list_options(cause.ops[0][0]) if is_step else ()
        return (
            keep_different(options),
            self._spectrum.list_missing(cause),
            keep_different(self._list_definitions(cause.ops[0])),
            self._list_entered(cause.ops[0]),
            self._list_received(cause.ops[0]) if defines else (),
            self._list_made(cause.ops[0][0], [cause.targets[0].mark[2]]) if defines or cause.known else (),
        )

    def _list_conditions(self, branches: Sequence[Origin]) -> Iterator[Origin]:
        """Yield the nearest definition of another value than on one device for which ranks run parallel code."""
        for each in (branch for branch in branches if branch.kind == "parallel"):
            site = find_line(*self._lines.place_of(each.line))
            found = keep_different(self._lines.define((site,), of_conditions=True))
            yield from (each.model_copy(update={"kind": "condition"}) for each in itertools.islice(found, 1))

    def _list_by_kind(self, cause: OperatorCause, kind: str) -> Iterator[Origin]:
        """Yield the lines that make a wrong first value, run a needless operation, or take shared memory."""
        if self._joint.op(cause.ops[0]).step < 0:
            yield from self._list_made(cause.ops[0][0], [cause.targets[0].mark[2]])
        if kind == "removed":
            yield from self._lines.list_deciding(self._lines.sites(cause.ops[0]))
        if kind == "owned":
            yield from self._lines.list_choosing(cause.ops[0])
        if cause.known == "shared":
            yield from self._lines.list_aliases(cause.ops[0][0], cause.targets[0].mark[2])

    def _choose(
        self,
        named: Collection[tuple[str, int]],
        *sources: Iterable[Origin],
        branches: Sequence[Origin] = (),
        is_group: bool = False,
    ) -> tuple[Origin, ...]:
        """Return the first three origins of several sources, one for each line that is not named already.

        Lines of `branches` come first, as the origin of a source that has the same line, if there is one.
        """
        found: dict[tuple[str, int], Origin] = {}
        first = {(origin.line.file, origin.line.line): origin for origin in branches}
        for origin in itertools.chain(*sources):
            place = (origin.line.file, origin.line.line)
            # Definitions of both sides say little beside other lines, or near them if their values differ.
            is_plain = not is_group and origin.kind == "definition" and not origin.is_of_ranks
            is_seen = is_plain and any(
                origin.here is None or (place[0] == file and abs(place[1] - line) <= _NEAR)
                for file, line in (*found, *first)
            )
            if place not in named and (place in first or not is_seen):
                found.setdefault(place, origin)
            if len(found) == _MOST:
                break
        chosen = {place: origin for place, origin in (first | found).items() if place not in named}
        return tuple(map(self._branches.mark, tuple(chosen.values())[:_MOST]))

    def find_branches(self, cause: OperatorCause) -> tuple[Origin, ...]:
        """Return the branches that ranks alone take around a value that nothing wrote."""
        return tuple(self._branches.list_nearest(cause))

    def find_maker(self, op: At) -> At:
        """Return the operator of user code that made a tensor before the first step."""
        return self._lines.find_maker(op)

    def find_made(self, op: At) -> tuple[Origin, ...]:
        """Return the line of user code that made a tensor before the first step, and definitions of its part."""
        return tuple(itertools.islice(self._describe_made(op), _MOST))

    def _describe_made(self, op: At) -> Iterator[Origin]:
        """Yield the line of user code that made a tensor before the first step, and definitions of its part."""
        sites = self._lines.made_at(op)
        if sites:
            yield make_origin("made", sites)
            yield from self._lines.define(sites, has_objects=True)

    def _list_made(self, rank: int, labels: Iterable[str]) -> Iterator[Origin]:
        for label in labels:
            if (op := self._lines.makers.get((rank, label))) is not None:
                yield from self._describe_made(op)

    def _list_copied(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield the lines that made copies of a parameter, which operators use in its place."""
        for op in list_copies(self._alignment, cause.ops[0][0], cause.targets[0].mark):
            yield from self._describe_made(op)

    def _list_received(self, first: At) -> Iterator[Origin]:
        """Yield the collectives whose results an operation takes directly."""
        for at in self._joint.reads(first):
            before = [*list_chain(self._joint, [at]), self._joint.maker(skip_moves(self._joint, at))]
            for op in [op for op in before if self._joint.op(op).meeting is not None][:1]:
                is_own = op[0] == first[0] and self._joint.op(op).phase == self._joint.op(first).phase
                if is_own and self._joint.op(op).sites and (sites := self._lines.sites(op)):
                    yield make_origin("collective", sites)

    def _list_derivatives(self, first: At) -> Iterator[Origin]:
        """Yield the nearest lines of user code that compute a gradient, such as in a custom backward function."""
        joint = self._joint

        def reads(op: At) -> list[At]:
            return [at for at in self._joint.own_reads(op) if joint.op(joint.maker(at)).phase == "backward"]

        if joint.op(first).phase != "backward":
            return
        for op in walk_back(joint, [first], reads, _MOST_NEAR):
            own = [site for site in joint.op(op).sites if is_of_user(site.file)]
            if own and op != first and self._lines.is_parallel(own[0]):
                yield make_origin("derivative", own)
        yield from self._list_backward(first)

    def _list_backward(self, first: At) -> Iterator[Origin]:
        """Yield the lines of ranks alone that return the gradient of a value, which may run no operator.

        They are in the autograd functions that take the result of a wrong operator's forward operator, or an input of
        it, up to moves.
        """
        joint, origin = self._joint, self._joint.op(first).origin
        if origin < 0:
            return
        forward = (first[0], origin)
        inputs = list_of_step(joint, joint.own_reads(forward))
        moves = list_chain(joint, inputs)
        waiting = [*joint.results(forward), *inputs]
        waiting += list_of_step(joint, (at for op in moves for at in joint.own_reads(op)))
        seen: set[At] = set()
        while waiting and len(seen) < _MOST_FOLLOWED:
            for user in joint.users.get(waiting.pop(0), ()):
                if user in seen or user[0] != first[0] or joint.op(user).phase != "forward":
                    continue
                seen.add(user)
                lines = self._lines.list_backward(user)
                yield from (
                    make_origin("derivative", [each]) for each in lines if self._lines.is_parallel(each)
                )
                if not lines and is_passing(joint, user):
                    waiting += joint.results(user)

    def _list_repeated(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield the first collectives whose result is a wrong multiple, since their ranks have equal values."""
        target, rank = cause.targets[0], cause.ops[0][0]
        end = target.values.get(rank)
        if end is None or target.mark[1] == "loss":
            return
        ops = [op for op in self._joint.list_before([end]) if op[0] == rank]
        for op in sorted(ops, key=self._joint.place):
            recorded = self._joint.op(op)
            if recorded.meeting is None or recorded.step != target.mark[0]:
                continue
            taken = [self._alignment.find(at) for at in self._joint.reads(op) if at[0] == rank]
            made = map(self._alignment.find, self._joint.results(op))
            num_ranks = len(recorded.meeting.group.ranks)
            if any(_is_multiple(one, two, num_ranks) for one, two in zip(taken, made, strict=False)):
                yield make_origin("repeated", self._lines.stack(op) or self._lines.sites(op))

    def _list_lost(self, cause: OperatorCause, lacks: Sequence[Op]) -> Iterator[Origin]:
        """Yield the lines that made the tensors whose gradients have the addends which a wrong gradient lacks."""
        rank, mark = cause.ops[0][0], cause.targets[0].mark
        end = cause.targets[0].values.get(rank)
        adds = [op for op in lacks if op.short.rstrip("_") == "add"]
        if end is None or mark[1] != Kind.GRADIENT:
            return
        program, mine = self._joint.programs[rank], self._roots(end)
        missing = {root for op in adds for number in op.reads() for root in self._one.roots_of(number)} - mine
        weights: dict[bool, dict[int, None]] = {True: {}, False: {}}
        for op in program.ops:
            shapes = [program.values[number].shape for number in op.results]
            is_backward = (op.phase, op.step) == ("backward", mark[0]) and op.origin >= 0
            if not is_backward or self._joint.value(end).shape not in shapes:
                continue
            bases = map(program.base, program.ops[op.origin].reads())
            makers = dict.fromkeys(base.op for base in bases if program.ops[base.op].step < 0)
            for is_missing, roots in ((True, missing), (False, mine)):
                if roots & self._roots((rank, op.results[0])):
                    weights[is_missing] |= makers
        for maker in weights[True]:
            if maker not in weights[False]:
                yield from self._describe_made((rank, maker))

    def _list_unused(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield the collectives before an operation, in its step, whose results nothing uses."""
        joint, (rank, number) = self._joint, cause.ops[0]
        program = joint.programs[rank]
        shown = program.list_shown()
        for op in program.ops:
            is_before = op.step == program.ops[number].step and op.number < number
            if op.meeting is None or not (is_before and op.results):
                continue
            is_used = any(each in shown or joint.users.get((rank, each)) for each in op.results)
            sites = self._lines.sites((rank, op.number))
            if sites and not is_used and program.values[op.results[0]].is_floating:
                yield make_origin("unused", sites)

    def _list_overwritten(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield the lines that write over their own result of the same step, which nothing has read.

        Such as a copy to where the results of several micro-batches should add up.
        """
        joint, rank = self._joint, cause.ops[0][0]
        program, step = joint.programs[rank], joint.op(cause.ops[0]).step
        shown = program.list_shown()
        copies = (op for op in program.ops if op.short == "copy_" and op.step == step)
        for op in copies:
            before = program.values[next(iter(op.refs()))]
            last = program.ops[before.op]
            is_same = (last.name, last.step, last.sites[:1]) == (op.name, step, op.sites[:1])
            if not (is_same and before.is_floating) or before.number in shown:
                continue
            is_read = any(user != (rank, op.number) for user in joint.users.get((rank, before.number), ()))
            if not is_read and (sites := self._lines.sites((rank, op.number))):
                yield make_origin("overwrites", sites)

    def _list_draws(self, first: At) -> Iterator[Origin]:
        """Yield the lines of ranks alone that draw random numbers, before an operation of the step that uses some."""
        joint, rank = self._joint, first[0]
        step, own = joint.op(first).step, {(site.file, site.line) for site in self._lines.sites(first)[:1]}

        def reads(op: At) -> list[At]:
            return list_of_step(joint, joint.own_reads(op))

        before = {op[1] for op in walk_back(joint, [first], reads, _MOST_FOLLOWED)}
        draws = [op for op in joint.programs[rank].ops[: first[1]] if op.step == step and is_draw(op)]
        # The line may take a number, which no operator passes on.
        is_taken = any(
            op.number in before or own & {(site.file, site.line) for site in op.sites} for op in draws
        )
        if is_taken or is_draw(joint.op(first)):
            for sites in (self._lines.sites((rank, op.number)) for op in draws):
                if sites and self._lines.is_parallel(sites[0]):
                    yield make_origin("draw", sites)

    def _list_entered(self, op: At) -> Iterator[Origin]:
        """Yield the innermost call that one device does not run, if one device runs the operation's own line.

        Such as that of a function which a patch calls with other arguments.
        """
        sites = self._joint.sites(op)
        known = {(site.file, site.line) for each in self._one.program.ops for site in each.sites}
        first = next((at for at, site in enumerate(sites) if (site.file, site.line) not in known), 0)
        # Without user code on the stack, the model and the layout are those of this package.
        if first and (is_of_user(sites[first].file) or not self._lines.sites(op)):
            yield make_origin("entered", sites[first:])

    def _list_lineage(self, end: At | None) -> list[At]:
        """Return the operators of the step that carried the value of a result, the last one first.

        These are its copies, sums and multiples.
        """
        if end is None:
            return []
        if end not in self._lineages:
            self._lineages[end] = self._walk_lineage(end)
        return self._lineages[end]

    def _walk_lineage(self, end: At) -> list[At]:
        roots = self._roots(end)
        is_number = not self._joint.value(end).shape

        def reads(op: At) -> list[At]:
            values = [(at, self._joint.value(at)) for at in self._joint.reads(op)]
            floating = [at for at, value in values if value.is_floating and (is_number or value.shape)]
            own = [at for at in floating if at[0] == end[0]]
            recorded = self._joint.op(op)
            is_linear = recorded.short.rstrip("_") in _CARRYING or recorded.meeting is not None
            is_linear |= is_passing(self._joint, op)
            same = [at for at in own if is_linear or is_same(self._roots(at))]
            return list_of_step(self._joint, same)

        def is_same(mine: set[int]) -> bool:
            return not (roots and mine) or not roots.isdisjoint(mine)

        starts = map(self._joint.maker, list_of_step(self._joint, [end]))
        return list(walk_back(self._joint, starts, reads, _MOST_FOLLOWED))

    def _roots(self, at: At) -> set[int]:
        known = self._alignment.find(at)
        return set() if known is None or known.ids is None else set(self._one.roots(known.ids))

    def _list_cuts(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield calls of `detach` and collectives whose result passes no gradient, for a wrong gradient."""
        target, rank = cause.targets[0], cause.ops[0][0]
        program = self._joint.programs[rank]
        if self._joint.op(cause.ops[0]).phase != "backward" and target.mark[1] != "gradient":
            return
        usual = {sites[:1] for _, _, sites in self._one.program.cuts}
        labels = {value.number for value in program.values if value.label and value.label == target.mark[2]}
        for number, value, sites in program.cuts:
            is_here = number < len(program.ops) and program.ops[number].step == target.mark[0]
            # Autograd detaches a result to save it: the call is then that of the operator which made the result.
            is_saved = sites[:1] == self._joint.op(self._joint.maker((rank, value))).sites[:1]
            if is_saved or not (is_here and sites and is_of_user(sites[0].file)) or sites[:1] in usual:
                continue
            before = self._joint.list_before([(rank, value)])
            is_before = any((rank, program.values[each].op) in before for each in labels)
            known = self._alignment.find((rank, value))
            is_target = (
                known is not None and known.ids is not None and self._one.label(known.ids) == target.mark[2]
            )
            if is_target or ((not labels or is_before) and not self._is_harmless(rank, before)):
                yield make_origin("cut", sites)

    def _is_harmless(self, rank: int, before: Collection[At]) -> bool:
        """Return whether a parameter that operators before a cut read has a right gradient all the same."""
        names = {each.mark[2] for each in self._right if each.mark[1] == "gradient" and rank in each.values}
        program = self._joint.programs[rank]
        read = (number for at in before if at[0] == rank for number in program.ops[at[1]].reads())
        return any(program.base(number).label in names for number in read)

    def _list_parts(self, taken: Sequence[At]) -> Iterator[Origin]:
        """Yield the operators that made parts of a sum, and those that passed them on, the last one first."""
        phases = {self._joint.op(user).phase for at in taken for user in self._joint.users.get(at, ())}

        def parts(op: At) -> list[At]:
            floating = [at for at in self._joint.reads(op) if self._joint.value(at).is_floating]
            same = [at for at in floating if self._joint.op(self._joint.maker(at)).phase in phases]
            return list(filter(self._is_part, same))

        makers = map(self._joint.maker, filter(self._is_part, taken))
        passed = list(walk_back(self._joint, makers, parts, _MOST_PARTS))
        starts = [op for op in passed if not parts(op)]
        for op in [*sorted(starts, key=self._joint.place), *passed]:
            if sites := self._lines.stack(op):
                yield make_origin("part", sites)

    def _is_part(self, at: At) -> bool:
        """Return whether a value is a part of a sum that no reduction made."""
        known = self._alignment.find(at)
        return (
            known is not None and bool(known.over) and self._joint.op(self._joint.maker(at)).meeting is None
        )

    def _list_regrouped(self, cause: OperatorCause) -> Iterator[Origin]:
        """Yield the definitions of a wrong group, those named after its mesh axis first, or of a sender."""
        if cause.repairs[0].place[:1] == (RING,):
            yield from self._lines.define(self._lines.sites(cause.ops[0]))
            return
        axis, _ = cause.repairs[0].numbers[0]
        yield from self._lines.define(self._lines.sites(cause.ops[0]), keyword="group", words=axis.split(AND))

    def _list_definitions(self, first: At) -> Iterator[Origin]:
        """Yield the lines that define the numbers and flags of an operation; nothing for a derivative."""
        recorded = self._joint.op(first)
        if recorded.sites and (sites := self._lines.sites(first)):
            yield from self._lines.define(sites, is_of_tensors=not has_numbers(recorded))


def _is_multiple(one: Known | None, two: Known | None, factor: float) -> bool:
    """Return whether a value is a wrong multiple, by a factor, of another one with the same elements, no parts."""
    if one is None or two is None or one.over or two.over or one.ids is None or two.ids is None:
        return False
    is_wrong = not math.isclose(two.scale, 1.0)
    return is_wrong and torch.equal(one.ids, two.ids) and math.isclose(two.scale, one.scale * factor)
