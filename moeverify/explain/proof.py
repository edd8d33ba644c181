"""Proof of repairs: executes the programs with an edit and checks that wrong results become right."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.compare import TOLERANCE, is_right
from moeverify.explain.content import says_something
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.describe import list_differences, list_numbers
from moeverify.explain.edit import SUBSTITUTIONS, TOTALS, Edit
from moeverify.explain.joint import At, Changes, Execution, Joint
from moeverify.explain.landmarks import Landmarks
from moeverify.explain.program import Op, Value
from moeverify.explain.suspects import Target, is_target_right, measure_target
from moeverify.results.checks import Kind

_LEFT = 0.05
"""Maximum fraction of a result's error that may be left after a repair."""


class Proof:
    """Executes edits and judges the results. `right` are results that must stay right; `wrong` are the wrong ones."""

    def __init__(
        self,
        joint: Joint,
        alignment: Alignment,
        one: OneDevice,
        landmarks: Landmarks,
        right: Sequence[Target],
        wrong: Sequence[Target],
    ) -> None:
        self._joint, self._alignment, self._one = joint, alignment, one
        self._landmarks, self._right, self._wrong = landmarks, right, wrong

    def is_local(self, edit: Edit, unknown: Sequence[At], state: Execution) -> bool:
        """Return whether an edit gives its operators the results of their counterparts.

        A collective over another group gives a value of one device: any rank alone has a part of a sum. One device
        may add a share to other values than those of its sum: then the next module ends must become right.
        """
        if edit.kind in ("value", "removed"):
            return False
        if edit.kind == "returned":
            return True
        if edit.kind == "share" and (marks := self._next_landmarks(edit, unknown)):
            done = self._joint.execute(edit.changes, marks, state)
            return all(self._is_end_right(at, done) for at in marks)
        results = [(at[0], self._joint.op(at).results[0]) for at in edit.ops]
        done = self._joint.execute(edit.changes, results, state)
        alignment = self._alignment.under(done)
        for at, result in zip(edit.ops, results, strict=True):
            known = None if result in done.tainted else alignment.find(result)
            other = edit.others.get(at)
            is_empty = 0 in self._joint.value(result).shape  # such as the rows of an expert that nobody chose
            if is_empty or self._is_number_of(done.data(result), other):
                continue
            if known is None or known.ids is None or (edit.kind == "group" and known.over):
                return False
            # Rows that one device computes in several calls may be together on a rank.
            if other is not None and not (
                self._one.holds(other.results[0], known.ids) or self._one.holds_at_place(other, known.ids)
            ):
                return False
        return True

    def _is_number_of(self, data: Tensor | None, other: Op | None) -> bool:
        """Return whether an indistinct value, such as a single number, equals the counterpart's result."""
        right = self._one.data(other.results[0]) if other is not None and other.results else None
        if data is None or right is None or says_something(data) or data.shape != right.shape:
            return False
        return is_right(data, right)

    def repairs(
        self, edit: Edit, target: Target, unknown: Sequence[At], state: Execution
    ) -> Execution | None:
        """Return the execution with an edit if it repairs the target or the next landmarks before it.

        Otherwise return None.
        """
        if not target.tells():
            return None
        marks = self._next_landmarks(edit, unknown)
        done = self._joint.execute(edit.changes, marks or list(target.values.values()), state)
        if marks and not all(self._is_end_right(at, done) for at in marks):
            if edit.kind not in ("block", "created") or not done.has_other_choices():
                return None
            marks = []  # operators after other choices cannot be executed
        after = self._joint.execute(edit.changes, None, state)
        fits = self._fits(edit, target, after) and not self.breaks(after)
        if not fits or self._is_arbitrary(edit, target, marks, after, state):
            return None
        if self.is_repaired(target, after) and not self._is_of_signs(edit, target, after):
            return after
        # If the target cannot be computed again, the next results that can be computed decide.
        is_open = after.has_other_choices() or not after.tainted.isdisjoint(target.values.values())
        if marks and not self._goes_on(marks, after):
            return None
        advances = self._advances(edit, after if edit.kind == "block" else done, state)
        decides = edit.kind == "created" and self._decides_right(after)
        return after if (marks and is_open) or advances or decides else None

    def _is_arbitrary(
        self, edit: Edit, target: Target, marks: Sequence[At], after: Execution, state: Execution
    ) -> bool:
        """Return whether other values in the same elements repair as much as those that an edit inserts.

        Such as any maximum in a softmax, which cancels. Then no value of this place is wrong. Choices, such as of
        experts, are the same for many values, and do not tell.
        """
        values = _distort({at: data for at, data in edit.changes.values.items() if data.is_floating_point()})
        results = target.values.items()
        is_finite = all(measure_target(state.data(at), target, rank) < math.inf for rank, at in results)
        is_repaired = self.is_repaired(target, after)
        shown = list(target.values.values()) if is_repaired else marks
        if not (values and shown and is_finite) or after.has_other_choices(shown):
            return False
        again = self._joint.execute(edit.changes | Changes(values=values), shown, state)
        return (
            self.is_repaired(target, again)
            if is_repaired
            else all(self._is_end_right(at, again) for at in marks)
        )

    def _is_of_signs(self, edit: Edit, target: Target, after: Execution) -> bool:
        """Return whether other choices of experts may repair a buffer by chance, such as biases moved by signs."""
        is_of_input = edit.kind in ("block", "created")
        return is_of_input and target.mark[1] == Kind.BUFFER and after.has_other_choices()

    def count(self, state: Execution) -> int:
        """Return how many of the wrong results are right."""
        return sum(self.is_repaired(each, state) for each in self._wrong)

    def may_be_chance(self, edit: Edit, done: Execution) -> bool:
        """Return whether a total instead of a part repairs a later sum of the ranks, and no wrong gradient."""
        known = [self._alignment.find(at) for at in edit.changes.values]
        is_of_parts = edit.kind in SUBSTITUTIONS and all(each is not None and each.over for each in known)
        if not (is_of_parts or edit.kind in TOTALS) or done.has_other_choices():
            return False
        gradients = [each for each in self._wrong if each.mark[1] == Kind.GRADIENT]
        return bool(gradients) and not any(self.is_repaired(each, done) for each in gradients)

    def resize(self, edit: Edit, state: Execution) -> Execution | None:
        """Return the execution with an edit if it only gives results the sizes and values of their counterparts.

        For example, another number of chosen values. Later operators were recorded with other sizes.
        """
        if not self._has_other_numbers(edit):
            return None
        after = self._joint.execute(edit.changes, None, state)
        return after if self._has_other_sizes(edit, after) and self.is_local(edit, (), state) else None

    def _has_other_numbers(self, edit: Edit) -> bool:
        """Return whether an edit changes numbers, but not the sizes of a view or a new tensor."""
        for at, other in edit.others.items():
            op = self._joint.op(at)
            is_view = any(self._joint.value((at[0], number)).alias >= 0 for number in op.results)
            numbers = list_numbers(op, other)
            is_new = not list(op.reads())
            if is_view or is_new or not numbers or len(numbers) < len(list_differences(op, other)):
                return False
        return edit.kind == "number" and bool(edit.others)

    def _goes_on(self, marks: Sequence[At], after: Execution) -> bool:
        """Return whether something beyond `marks` is right too: a module end, or else any value.

        One is enough: layouts have ends that are parts of sums. If nothing beyond them changed that precedes
        the first changed integer, the marks alone decide.
        """
        joint, alignment, landmarks = self._joint, self._alignment.under(after), self._landmarks
        choice = after.first_choice()
        named = {landmarks.by_rank[at[0]][at[1]] for at in marks}  # in other micro-batches too
        last = max(joint.place(joint.maker(at)) for at in marks)
        later = [
            at
            for at in after.changed()
            if at not in after.tainted
            and alignment.tells(at)
            and (choice is None or joint.place(joint.maker(at)) < joint.place(choice))
        ]
        ends = [at for at in later if landmarks.is_end(at) and landmarks.list_right(at) and at not in marks]
        others = [at for at in ends if landmarks.by_rank[at[0]][at[1]] not in named]
        if ends:
            return any(landmarks.is_right(at, alignment) for at in others or ends)
        beyond = [at for at in later if joint.place(joint.maker(at)) > last]
        return not beyond or any(alignment.find(at) is not None for at in beyond)

    def _fits(self, edit: Edit, target: Target, after: Execution) -> bool:
        """Return whether sizes stay as recorded, or a number changes sizes only between it and the target."""
        if edit.kind not in ("number", "whole") or not self._has_other_sizes(edit, after):
            return True
        keeps = all(_has_shape(after.data(at), self._joint.value(at)) for at in target.values.values())
        return self._has_other_numbers(edit) and keeps and self.is_repaired(target, after)

    def _has_other_sizes(self, edit: Edit, after: Execution) -> bool:
        """Return whether a result has another shape after an edit, so that recorded sizes may not fit."""
        results = [at for op in edit.ops for at in self._joint.results(op)]
        found = ((at, after.data(at)) for at in results)
        return any(data is not None and not _has_shape(data, self._joint.value(at)) for at, data in found)

    def breaks(self, after: Execution) -> bool:
        """Return whether results that were right become wrong.

        Buffers after other choices of experts do not count: the signs of loads may be right by chance.
        """
        changed, is_open = after.changed(), after.has_other_choices()
        return any(
            at in changed and at not in after.tainted and not is_target_right(changed[at], target, rank)
            for target in self._right
            if not (is_open and target.mark[1] == Kind.BUFFER)
            for rank, at in target.values.items()
        )

    def _decides_right(self, after: Execution) -> bool:
        """Return whether the first changed decisions of all ranks, such as of experts, take right numbers.

        Later operators were recorded for other decisions. The numbers must have been wrong before.
        """
        joint, alignment = self._joint, self._alignment.under(after)
        decided = dict[int, At]()
        for op in after.list_choices():
            if any(joint.value(each).is_floating for each in joint.own_reads(op)):
                decided[op[0]] = min(op, decided.get(op[0], op), key=joint.place)
        taken = [at for op in decided.values() for at in joint.own_reads(op) if joint.value(at).is_floating]
        return bool(taken) and all(
            at in after.changed()
            and at not in after.tainted
            and alignment.tells(at)
            and alignment.is_right(at)
            for at in taken
        )

    def _advances(self, edit: Edit, done: Execution, state: Execution) -> bool:
        """Return whether all values that an edit changes are known, including values beyond its own results.

        Only values that can be executed count: operators with recorded sizes cannot take other shapes. Blocks of
        parameters change values up to the first other choice, such as of experts.
        """
        choice = done.first_choice() if edit.kind == "block" else None
        is_open = choice is not None or (edit.kind in ("number", "operator") and bool(edit.others))
        if not is_open or done.tainted - state.tainted:
            return False
        alignment = self._alignment.under(done)
        joint = self._joint
        own = {(at[0], number) for at in edit.ops for number in joint.op(at).results}
        num_beyond = 0
        for at, data in done.changed().items():
            if (
                at in edit.changes.values
                or at in state.changed()
                or at in done.tainted
                or not says_something(data)
                or (choice is not None and joint.place(joint.maker(at)) >= joint.place(choice))
            ):
                continue
            if alignment.find(at) is None:
                return False
            num_beyond += at not in own
        return num_beyond > 1

    def _next_landmarks(self, edit: Edit, unknown: Sequence[At]) -> list[At]:
        """Return the first module ends on each rank that depend on an edit."""
        joint, inside = self._joint, set(unknown)
        found: dict[int, At] = {}
        first = () if edit.kind == "returned" else edit.ops
        waiting = [(joint.place(op), op) for op in first]
        waiting += [(joint.place(op), op) for at in edit.changes.values for op in joint.users.get(at, ())]
        seen = {op for _, op in waiting}
        heapq.heapify(waiting)
        while waiting:
            _, op = heapq.heappop(waiting)
            rank = op[0]
            if rank in found:
                continue
            for number in joint.op(op).results:
                if self._landmarks.is_end((rank, number)) and op in inside:
                    found.setdefault(rank, (rank, number))
                for user in joint.users.get((rank, number), ()):
                    for each in joint.members(user):
                        if each not in seen:
                            seen.add(each)
                            heapq.heappush(waiting, (joint.place(each), each))
        return [at for rank, at in found.items() if rank in {op[0] for op in edit.ops}]

    def _is_end_right(self, at: At, state: Execution) -> bool:
        return at not in state.tainted and self._landmarks.is_right(at, self._alignment.under(state))

    def is_repaired(self, target: Target, state: Execution) -> bool:
        """Return whether a target is right on all ranks.

        An error slightly above the tolerance must not only fall slightly below it.
        """
        for rank, at in target.values.items():
            error = measure_target(state.data(at), target, rank)
            before = measure_target(self._joint.data(at), target, rank)
            if at in state.tainted or not error <= min(TOLERANCE, _LEFT * before):
                return False
        return True


def _distort(values: Mapping[At, Tensor]) -> dict[At, Tensor]:
    """Return other finite numbers, equal ones for equal ones, that are no linear function of the right ones."""
    largest = max((float(data[data.isfinite()].abs().sum()) for data in values.values()), default=0.0)
    return {
        at: torch.where(data.isfinite(), data + data.abs() + largest, data) for at, data in values.items()
    }


def _has_shape(data: Tensor | None, value: Value) -> bool:
    return data is not None and tuple(data.shape) == value.shape
