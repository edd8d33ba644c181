"""Search for the causes of wrong results.

It edits operators between right and wrong values, executes the programs, and keeps the edits that repair
the results.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from moeverify.explain.addends import Addends
from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import is_own_op, list_copied, takes_pair
from moeverify.explain.compare import relative_error
from moeverify.explain.counterparts import Counterparts, OneDevice
from moeverify.explain.creation import Creation
from moeverify.explain.edit import SUBSTITUTIONS, TOTALS, Edit, Keys
from moeverify.explain.edit import Kind as EditKind
from moeverify.explain.edits import list_edits, list_skipped_writes
from moeverify.explain.further import Further
from moeverify.explain.joint import At, Changes, Execution, Joint
from moeverify.explain.landmarks import Landmarks
from moeverify.explain.missing_sums import list_missing_sums
from moeverify.explain.multiples import list_scaled_lines, list_unscaled
from moeverify.explain.narrowing import find_narrowing
from moeverify.explain.numbers import list_constants
from moeverify.explain.origins import Origins
from moeverify.explain.program import Program
from moeverify.explain.proof import Proof
from moeverify.explain.races import list_races
from moeverify.explain.regroup import Groups, list_of_axes, list_regroupings
from moeverify.explain.relation import find_factor, find_relation
from moeverify.explain.returns import list_returns
from moeverify.explain.shorten import Shortener
from moeverify.explain.suspects import Target, find_targets, list_independent, list_unknown, order_of
from moeverify.explain.wrong_groups import widen
from moeverify.results.checks import Kind

_VAGUE = frozenset({"inserted", "whole", "value"})
_SAYS_LESS = {
    "scale": _VAGUE | {"removed", "total", "share", "unreduced"},  # several totals add up to a multiple
    "reduction": _VAGUE | {"removed"},
    "moved": _VAGUE,
    "shared": frozenset(get_args(EditKind)),
}
"""Kinds of edits that say less than a known relation of the result to single-device values."""

_MOST_SUSPECTS = 12
_MOST_ROUNDS = 40
_LONGEST_CHAIN = 8
_MOST_BRANCHES = 2


@dataclass(frozen=True)
class _Stretch:
    """Operators between right values and wrong results, in program order.

    `ends` compute the wrong results.
    """

    alignment: Alignment
    unknown: Sequence[At]
    ends: frozenset[At]


class Explainer:
    """Search for the causes of wrong results, given the programs of the ranks and of the single device.

    `scales` are factors by which a layout may multiply values, and `groups` the rank groups of each mesh axis.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        one: Program,
        step: int,
        scales: Sequence[float],
        groups: Groups | None = None,
    ) -> None:
        self.groups = groups or {}
        self.joint = Joint(programs, list_constants(one))
        self.step = step
        self.alignment = Alignment(self.joint, one, scales)
        self.one = OneDevice(one, self.alignment.elements)
        wrong, self.right = find_targets(self.joint, one, step)
        self.wrong = sorted(wrong, key=order_of)
        self.causes: list[OperatorCause] = []
        self.tried = 0
        self._searched: set[Keys] = set()
        self.is_done = False
        self._proves = True
        self._on_place: Callable[[list[OperatorCause]], object] | None = None
        self.landmarks = Landmarks(programs, self.one, step)
        self._addends = Addends(self.joint, one)
        self._further = Further(self.joint, self.one, step, self.groups)
        self.independent = list_independent(self.joint, self.right, self.wrong)
        self.proof = Proof(self.joint, self.alignment, self.one, self.landmarks, self.independent, self.wrong)
        self._shortener = Shortener(self.joint, self.proof, self.wrong)
        self.origins = Origins(self.alignment, self.one, self.proof.breaks)

    def explain(
        self,
        seconds: float,
        *,
        proves: bool = True,
        on_place: Callable[[list[OperatorCause]], object] = lambda causes: None,
    ) -> list[OperatorCause]:
        """Return the causes of wrong results that are found within `seconds`.

        With `proves=False`, return a narrow dtype or the first wrong place, and execute no other edit.
        `on_place` is called with races and the first wrong place before any other edit is executed.
        """
        self._proves, self._on_place, self.causes = proves, on_place, []
        end = time.monotonic() + seconds
        left = list(self.wrong)
        narrow = find_narrowing(self.alignment, self.step)
        for race in list_races(self.alignment, self.step, self.wrong or self.right):
            self._add(race)
        if narrow is not None:
            self._add(narrow)
        state = self.joint.execute(Changes() if narrow is None else narrow.repairs[0].changes)
        for _ in range(_MOST_ROUNDS):
            left = [
                target
                for target in left
                if not (self.proof.is_repaired(target, state) or self._follows(target))
            ]
            self.is_done = not left
            if not left or time.monotonic() > end:
                break
            causes, state = self._explain_first(left[0], state, end)
            self._note_repaired(causes, left, state)
            for cause in causes:
                self._add(cause)
            if state.has_other_choices():
                self.is_done = True  # later results depend on integers that changed and cannot be executed
                break
            if not proves:
                break
            if not self.proof.is_repaired(left[0], state):
                state = self._patch(left[0], state)
        return self.causes

    def _note_repaired(
        self, causes: Sequence[OperatorCause], left: Sequence[Target], state: Execution
    ) -> None:
        """Record on the causes which wrong results are right after their repairs."""
        proved = [cause for cause in causes if cause.repairs and not cause.is_local]
        done = [target for target in left if proved and self.proof.is_repaired(target, state)]
        for cause in proved:
            cause.repaired += ["/".join(target.mark[1:]) for target in done]
            errors = [
                relative_error(data, target.right[rank])
                for target in done
                for rank, at in target.values.items()
                if (data := state.data(at)) is not None and data.numel() == target.right[rank].numel()
            ]
            cause.residual = max(errors, default=None)

    def _follows(self, target: Target) -> bool:
        """Return whether a known cause may explain a result, which depends on it or comes after it.

        Python numbers, such as the coefficient of a clip, carry errors along without an operator.
        """
        for cause in self.causes:
            if order_of(target) > min(map(order_of, cause.targets)):
                return True
            ops = set(cause.ops)
            if target not in cause.targets and all(
                self.joint.list_before([at]) & ops for at in target.values.values()
            ):
                return True
        return False

    def _patch(self, target: Target, state: Execution) -> Execution:
        """Return the execution with a target replaced by the right value, which may repair later results."""
        changes = Changes()
        for rank, at in target.values.items():
            for same in self._list_copied(at):
                changes.values[same] = target.right[rank].reshape(self.joint.value(same).shape)
        return self.joint.execute(changes, None, state)

    def _list_copied(self, at: At) -> list[At]:
        """Return a value, followed by the values of which it is a full copy or full view."""
        size = math.prod(self.joint.value(at).shape)
        copied = list_copied(self.joint, at)
        return list(itertools.takewhile(lambda each: math.prod(self.joint.value(each).shape) == size, copied))

    def _add(self, cause: OperatorCause) -> None:
        """Add a cause, or merge it with an earlier cause of the same line."""
        for known in self.causes:
            if self._place(known) == self._place(cause):
                known.ops += cause.ops
                known.targets += cause.targets
                known.repaired += cause.repaired
                return
        self.causes.append(cause)

    def _place(self, cause: OperatorCause) -> tuple[object, ...]:
        op = self.joint.op(cause.ops[0])
        repair = (cause.repairs[0].kind, cause.repairs[0].place) if cause.repairs else ()
        return op.name, self.joint.sites(cause.ops[0])[:1], repair

    def _explain_first(
        self, target: Target, state: Execution, end: float
    ) -> tuple[list[OperatorCause], Execution]:
        """Return the causes of a wrong result, and the execution after the repair.

        A cause without repairs is only a place.
        """
        is_recorded = state.changed().keys().isdisjoint(target.values.values())
        if is_recorded and (summed := self._addends.explain(target)) is not None:
            return self._explain_sum(summed, state, end)
        alignment = self.alignment.under(state)
        factor = find_factor(self.alignment, target, state)
        if factor is not None:
            alignment = alignment.without_scale(factor)
        stretch = self._open(alignment, target)
        first = next(self._with_makers(self._list_suspects(stretch), True), None)
        place = [] if first is None else [OperatorCause(list(first), [], [target])]
        if first is not None:
            place[0].stretch = self._list_stretch(first, stretch.unknown)
            place[0].known = find_relation(alignment, target, factor)
            place[0].factor = 1.0 if factor is None else factor
        self._tell_place(*place)
        if place and any(self._place(place[0]) == self._place(each) for each in self.causes):
            return place, state
        less = _SAYS_LESS.get(place[0].known, frozenset()) if place else frozenset()
        found = None
        if self._proves:
            edits = self._further.list_first(stretch.alignment, stretch.unknown, state)
            edits = (edit for edit in edits if edit.kind not in less)
            found = self._try(edits, target, stretch.unknown, state, end)
            self._searched.clear()
            found = found or self._search(target, state, stretch, end)
        if found is None or found[0][0].repairs[0].kind in less:
            return place, state
        return self._widen(*found, stretch.unknown, state)

    def _explain_sum(
        self, summed: OperatorCause, state: Execution, end: float
    ) -> tuple[list[OperatorCause], Execution]:
        """Return the group or write without which a wrong sum is right, if there is one, else the sum."""
        self._tell_place(summed)
        edits = itertools.chain(
            list_regroupings(self.alignment, self.groups, summed.ops),
            list_skipped_writes(self.alignment, summed.stretch, trusts=True),
        )
        found = self._try(edits if self._proves else (), summed.targets[0], summed.stretch, state, end)
        if found is not None:
            found[0][0].sums = summed.sums
        return ([summed], state) if found is None else self._widen(*found, summed.stretch, state)

    def _widen(
        self, causes: list[OperatorCause], done: Execution, unknown: Sequence[At], state: Execution
    ) -> tuple[list[OperatorCause], Execution]:
        """Return causes and execution, with a wrong group changed wherever it is used if that repairs more."""
        first, edit = causes[0], causes[0].repairs[0]
        whole = widen(self.alignment.under(state), self.groups, edit, state) if len(causes) == 1 else None
        after = None if whole is None else self.proof.repairs(whole, first.targets[0], unknown, state)
        if whole is None or after is None:
            return causes, done
        if self.proof.count(done) >= self.proof.count(after):
            return causes, done
        return [replace(first, ops=list(whole.ops), repairs=[whole])], after

    def _tell_place(self, *places: OperatorCause) -> None:
        """Call `on_place` with the first place."""
        if self._on_place is not None:
            self._on_place([*self.causes, *places])
            self._on_place = None

    def _open(self, alignment: Alignment, target: Target) -> _Stretch:
        """Return the operators from right values to the target, or to the first wrong module ends before."""
        values = list(target.values.values())
        ends = self.landmarks.find_first_wrong(alignment, values)
        makers = frozenset(self.joint.maker(at) for at in (*values, *ends))
        return _Stretch(alignment, list_unknown(alignment, ends or values), makers)

    def _comes_after(self, edit: Edit, suspects: set[At]) -> bool:
        """Return whether an edit replaces values computed from suspects, which would hide errors in these."""
        return bool(suspects) and not suspects.isdisjoint(self.joint.list_before(list(edit.changes.values)))

    def _list_stretch(self, ops: Sequence[At], unknown: Sequence[At]) -> list[At]:
        """Return the unknown operators from a suspect to the next module end, in program order."""
        joint, inside = self.joint, set(unknown)
        found, waiting = dict.fromkeys(ops), list(ops)
        while waiting:
            op = waiting.pop(0)
            for number in joint.op(op).results:
                if self.landmarks.is_end((op[0], number)) and op not in ops:
                    continue
                for user in joint.users.get((op[0], number), ()):
                    if user in inside and user not in found:
                        found[user] = None
                        waiting.append(user)
        return sorted(found, key=joint.place)

    def _search(
        self, target: Target, state: Execution, stretch: _Stretch, end: float, chosen: Keys = frozenset()
    ) -> tuple[list[OperatorCause], Execution] | None:
        """Return edits that together repair a target, or the next module end before it.

        An edit that makes only the results of its own operators right is a first step; the search continues
        after it. Steps that were `chosen` in another order are not tried again.
        """
        alignment, unknown = stretch.alignment, stretch.unknown
        suspects = [*itertools.islice(self._with_makers(self._list_suspects(stretch), False), _MOST_SUSPECTS)]
        counterparts = Counterparts(alignment, self.one)
        steps: list[tuple[Edit, Execution]] = []
        before: set[At] = set()
        for ops in suspects:
            moved = self._further.list_moved(alignment, ops)
            if (found := self._try(moved, target, unknown, state, end)) is not None:
                return found
            edits = (
                edit
                for edit in self._list_edits(alignment, counterparts, ops)
                if not self._undoes(edit, chosen)
                and not (edit.kind in SUBSTITUTIONS and self._comes_after(edit, before))
            )
            if (found := self._edit(edits, target, stretch, state, steps, end)) is not None:
                return found
            before.update(ops)
        lines = list_scaled_lines(alignment, suspects, self.origins)
        scaled = itertools.chain(lines, list_unscaled(alignment, unknown, self.origins))
        if (found := self._try(scaled, target, unknown, state, end)) is not None:
            return found  # one edit says more than a chain of them
        for step, after in steps[:_MOST_BRANCHES] if len(chosen) < _LONGEST_CHAIN else ():
            both = chosen | {step.key}
            if both in self._searched:
                continue
            self._searched.add(both)
            found = self._search(target, after, self._open(alignment.under(after), target), end, both)
            if found is not None and not self.proof.may_be_chance(step, found[1]):
                first = OperatorCause(list(step.ops), [step], [target])
                chain, done = self._shortener.shorten([first, *found[0]], found[1], target, unknown, state)
                return self._shortener.drop_patches(chain), done
        edits = (
            edit
            for edit in self._further.list_edits(alignment, counterparts, unknown, suspects)
            if not (edit.kind in SUBSTITUTIONS and self._comes_after(edit, before.difference(edit.ops)))
        )
        return self._try(
            itertools.chain(list_unscaled(alignment, unknown), edits), target, unknown, state, end
        )

    def _list_edits(
        self, alignment: Alignment, counterparts: Counterparts, ops: Sequence[At]
    ) -> Iterator[Edit]:
        """Yield edits of a suspect."""
        yield from list_of_axes(alignment, self.groups, ops)
        for edit in list_returns(alignment, self.one, self.landmarks, ops):
            # Values known without edits: a first step may have made a module's output a known value.
            if all(self.alignment.find(at) for at in edit.changes.values):
                yield edit
        yield from list_edits(alignment, self.one, counterparts, ops)

    def _edit(
        self,
        edits: Iterable[Edit],
        target: Target,
        stretch: _Stretch,
        state: Execution,
        steps: list[tuple[Edit, Execution]],
        end: float,
    ) -> tuple[list[OperatorCause], Execution] | None:
        """Return the first edit of a suspect that repairs a target.

        Edits that make only the results of their own operators right are added to `steps`.
        """
        alignment, unknown = stretch.alignment, stretch.unknown
        for edit in itertools.takewhile(lambda _: time.monotonic() <= end, edits):
            self.tried += 1
            if not self.proof.is_local(edit, unknown, state):
                continue
            found = self._prove(edit, target, unknown, state)
            if found is None:
                step = next(list_missing_sums(alignment, self.groups, edit, state), edit)
                steps.append((step, self.joint.execute(step.changes, None, state)))
                whole = widen(alignment, self.groups, step, state)
                found = self._try([whole] if whole else (), target, unknown, state, end)
            if found is not None:
                return found
        return None

    def _undoes(self, edit: Edit, chosen: Keys) -> bool:
        """Return whether an edit leaves out a collective that adds up the totals of `chosen` edits."""
        is_of_collective = self.joint.op(edit.ops[0]).meeting is not None
        has_totals = any(kind in TOTALS for kind, *_ in chosen)
        return edit.kind in ("group", "removed") and is_of_collective and has_totals

    def _prove(
        self,
        edit: Edit,
        target: Target,
        unknown: Sequence[At],
        state: Execution,
        done: Execution | None = None,
    ) -> tuple[list[OperatorCause], Execution] | None:
        """Return an edit that repairs a target: an earlier one than `edit`, or itself, which leads to `done`."""
        created = Creation(self.alignment.under(state), self.one).find(edit)
        sums = list_missing_sums(self.alignment.under(state), self.groups, edit, state)
        for each in itertools.chain(sums, () if created is None else (created,)):
            before = self.proof.repairs(each, target, unknown, state)
            if before is not None and not self.proof.may_be_chance(each, before):
                return [OperatorCause(list(each.ops), [each], [target])], before
        done = self.proof.repairs(edit, target, unknown, state) if done is None else done
        if done is None or self.proof.may_be_chance(edit, done):
            return None
        return [OperatorCause(list(edit.ops), [edit], [target])], done

    def _try(
        self, edits: Iterable[Edit], target: Target, unknown: Sequence[At], state: Execution, end: float
    ) -> tuple[list[OperatorCause], Execution] | None:
        """Return the first edit that repairs a target, or the next module end before it."""
        for edit in edits:
            if time.monotonic() > end:
                break
            self.tried += 1
            done = self.proof.repairs(edit, target, unknown, state)
            if done is not None and (found := self._prove(edit, target, unknown, state, done)) is not None:
                return found
            if done is None and (resized := self.proof.resize(edit, state)) is not None:
                return [OperatorCause(list(edit.ops), [edit], [target], is_local=True)], resized
        return None

    def _list_suspects(self, stretch: _Stretch) -> Iterator[tuple[At, ...]]:
        """Yield operators of a stretch with right operands and wrong results, grouped by place.

        Groups come in program order.
        """
        joint, alignment = self.joint, stretch.alignment
        seen: set[At] = set()
        inside = set(stretch.unknown)
        for at in stretch.unknown:
            results = joint.results(at)
            if at in seen or not results:
                continue
            if not (at in stretch.ends or any(map(alignment.is_wrong, results))):
                continue
            if not self._takes_right(alignment, at) or self._is_rewritten(stretch, at, results):
                continue
            group = [joint.maker(each) for each in alignment.siblings(results[0])]
            group = [each for each in group if each in inside and self._takes_right(alignment, each)]
            seen.update(group)
            yield tuple(group) or (at,)

    def _with_makers(self, suspects: Iterable[tuple[At, ...]], pairs: bool) -> Iterator[tuple[At, ...]]:
        """Yield suspects; before operators of this package, the user's operators that made their operands.

        These may have returned a right value of another place. With `pairs`, only operators count that take a pair.
        """
        for ops in suspects:
            own = [
                op for op in ops if is_own_op(self.joint, op) and (takes_pair(self.joint, op) or not pairs)
            ]
            makers = dict.fromkeys(self.joint.maker(at) for op in own for at in self.joint.reads(op))
            users = tuple(
                op for op in makers if self.joint.op(op).step >= 0 and not is_own_op(self.joint, op)
            )
            yield from filter(None, (users, ops))

    def _is_rewritten(self, stretch: _Stretch, op: At, results: Sequence[At]) -> bool:
        """Return whether the phase of an operator, before that of the wrong results, has right values again."""
        if op in self._proven:
            return True
        phase, wrong = self.joint.op(op).phase, [at for at in results if stretch.alignment.is_wrong(at)]
        if not wrong or phase in {self.joint.op(end).phase for end in stretch.ends}:
            return False
        ends = {(end[0], number) for end in stretch.ends for number in self.joint.op(end).results}
        return all(self.landmarks.is_recovered(at, stretch.alignment, ends) for at in wrong)

    def _takes_right(self, alignment: Alignment, op: At) -> bool:
        """Return whether no operand of an operator is wrong."""
        needs = (at for at in self.joint.needs(op) if self.joint.maker(at) not in self._proven)
        return not any(map(alignment.is_wrong, needs))

    @cached_property
    def _proven(self) -> set[At]:
        """The operators of passes whose results are right, since all losses, or all gradients, of the step are."""
        found: set[At] = set()
        for kind, phase in ((Kind.LOSS, "forward"), (Kind.GRADIENT, "backward")):
            if any(each.mark[1] == kind for each in self.wrong):
                break
            shown = [each for each in self.right if each.mark[1] == kind]
            before = self.joint.list_before([at for each in shown for at in each.values.values()])
            found |= {
                op for op in before if (self.joint.op(op).phase, self.joint.op(op).step) == (phase, self.step)
            }
        return found
