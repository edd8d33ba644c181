"""Search for the first operators whose values are not those of one device, upstream of a wrong operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moeverify.explain.agreement import Agreement
from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_passing, skip_moves
from moeverify.explain.joint import At
from moeverify.explain.operators import creates
from moeverify.explain.program import HIDDEN, Op, Site
from moeverify.explain.user_lines import UserLines, keep_different, make_origin
from moeverify.results.culprit import Origin

_MOST_FOLLOWED = 48
"""Maximum number of operators that are followed."""


class Divergences:
    """Search for the first operators whose values, also integers and masks, are not those of one device."""

    def __init__(self, alignment: Alignment, agreement: Agreement, lines: UserLines) -> None:
        self._alignment, self._agreement, self._lines = alignment, agreement, lines
        self._joint = alignment.joint

    def list_values(self, first: At, taken: Sequence[At]) -> Iterator[Origin]:
        """Yield the first operators whose integers, masks and numbers are not those of one device."""
        seen: set[At] = set()
        misplaced = set(taken)
        waiting = list(taken or self._joint.own_reads(first))
        yield from self._list_decisions([at for at in waiting if not self._joint.value(at).is_floating])
        while waiting and len(seen) < _MOST_FOLLOWED:
            at = waiting.pop(0)
            op = self._joint.maker(at)
            if op in seen:
                continue
            seen.add(op)
            is_told = self._alignment.tells(at) or not self._agreement.is_on_one_device(at)
            if self._joint.op(op).step < 0 and is_told:
                continue  # `_list_made` shows who made a weight
            reads = self._joint.own_reads(op)
            if self._agreement.agrees(at):
                # Elements of a right value are right, also those that a wrong index takes.
                is_taken = is_passing(self._joint, op) and self._joint.value(at).is_floating
                indices = [each for each in reads if is_taken and not self._joint.value(each).is_floating]
                yield from self._list_decisions(indices)
                moved = [each for each in reads if is_taken and at in misplaced and each not in indices]
                yield from self._list_created(moved)
                misplaced.update(moved)
                waiting += indices + moved
                continue
            wrong = [each for each in reads if not self._agreement.agrees(each)]
            yield from self._list_created(each for each in reads if each not in wrong)
            sites = self._lines.sites(op)
            if not wrong and sites and op != first and self._joint.op(op).short not in HIDDEN:
                yield from self._describe(at, sites)
                if has_numbers(self._joint.op(op)):
                    yield from keep_different(self._lines.define(sites))
            waiting += wrong

    def _describe(self, at: At, sites: tuple[Site, ...]) -> Iterator[Origin]:
        """Yield the origin of a value. One device runs no collectives, so that these are not suspect for it."""
        op = self._joint.maker(at)
        if self._joint.op(op).meeting is not None:
            yield make_origin("collective", sites)
            return
        if self._agreement.is_on_one_device(at):
            yield make_origin("value", sites)
            return
        sites = self._leave_out_right(op, sites)
        if not self._lines.is_run(sites[0], self._joint.op(op).name):
            yield make_origin("extra", sites)
            return
        # One device runs it for another caller: the call of ranks alone is the difference.
        own = next((at for at, site in enumerate(sites) if self._lines.is_parallel(site)), 0)
        if self._lines.is_branch((sites[own].file, sites[own].line)):
            yield make_origin("extra", sites[own:])

    def _leave_out_right(self, op: At, sites: tuple[Site, ...]) -> tuple[Site, ...]:
        """Return the calls of an operation, without its own line if that is right for another caller in the step."""
        recorded = self._joint.op(op)
        others = [
            (op[0], each.number)
            for each in self._joint.programs[op[0]].ops
            if (each.name, each.step) == (recorded.name, recorded.step) and each.number != op[1]
        ]
        for other in others:
            calls, made = self._lines.sites(other), self._joint.results(other)
            is_other_call = calls[:1] == sites[:1] and calls[1:2] != sites[1:2]
            if is_other_call and all(
                self._alignment.tells(at) and self._alignment.is_right(at) for at in made
            ):
                return sites[1:] or sites
        return sites

    def _list_created(self, values: Iterable[At]) -> Iterator[Origin]:
        """Yield the lines of ranks alone that create tensors of one number, such as zeros."""
        for rank, number in values:
            at = (rank, self._joint.programs[rank].base(number).number)
            op = self._joint.maker(at)
            recorded, sites = self._joint.op(op), self._lines.sites(op)
            data = self._alignment.data(at)
            is_filled = data is not None and data.numel() > 0 and bool((data == data.reshape(-1)[0]).all())
            is_created = recorded.short not in HIDDEN and creates(recorded) and recorded.step >= 0
            if is_created and is_filled and sites and self._lines.is_parallel(sites[0]):
                yield make_origin("extra", sites)

    def _list_decisions(self, indices: Sequence[At]) -> Iterator[Origin]:
        """Yield the operators that compute indices from floating-point numbers, if one device does not run them."""
        for at in indices:
            op = self._joint.maker(skip_moves(self._joint, at))
            made = (op[0], self._joint.op(op).results[0])
            decides = any(self._joint.value(each).is_floating for each in self._joint.own_reads(op))
            sites = self._lines.sites(op)
            if decides and sites and not self._agreement.is_on_one_device(made):
                yield make_origin("extra", sites)


def has_numbers(op: Op) -> bool:
    """Return whether an operator takes numbers other than sizes, or a process group."""
    return op.meeting is not None or any(isinstance(each, int | float) for each in op.args)
