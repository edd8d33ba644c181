"""Conversion of causes to records, with the names and lines of their operators and values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from moeverify.cases.axes.groups import AND
from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import (
    find_first_linear,
    find_whole,
    is_own_op,
    list_chain,
    list_reduced_modules,
    may_scale,
    skip_moves,
    skip_sums,
)
from moeverify.explain.counterparts import find_pair
from moeverify.explain.describe import (
    describe_at,
    describe_call,
    describe_op,
    describe_value,
    join,
    line_of,
    list_differences,
    name_of,
)
from moeverify.explain.edit import Edit
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import At
from moeverify.explain.missing_sums import list_reduced
from moeverify.explain.peers import RING
from moeverify.explain.program import HIDDEN, SETUP, Op
from moeverify.explain.regroup import name_ranks
from moeverify.explain.relation import find_shared
from moeverify.explain.same_line import find_alike, name_number
from moeverify.explain.suspects import Target, find_targets
from moeverify.explain.upstream import Upstream
from moeverify.explain.wrong_groups import EVERYWHERE
from moeverify.results.culprit import Culprit, Operation, SourceValue

_ADDING = frozenset({"add", "sub", "pow"})
"""Operators that make a multiple by adding values, so that no size of the run explains the factor."""

_MOST_REPAIRED = 20
_MOST_OTHERS = 4
_MOST_MIXED = 2
_LEAST_SHARE = 0.05
"""Minimum fraction of a mixed value's elements for which a source is named."""
_MOST_BETWEEN = 12
_OF_TENSORS = frozenset(
    {
        "operator",
        "operand",
        "whole",
        "inserted",
        "removed",
        "returned",
        "moved",
        "shared",
        "reduction",
        "total",
        "unreduced",
    }
)
"""Mechanisms that leave no number, group or flag in doubt."""


class Culprits:
    """Converter of causes to records. `sizes` has the named sizes of the run."""

    def __init__(self, explainer: Explainer, sizes: Mapping[str, float] | None = None) -> None:
        self._sizes = dict(sizes or {})
        self._landmarks = explainer.landmarks
        self._alignment, self._joint, self._one = explainer.alignment, explainer.joint, explainer.one
        self._right = explainer.right
        self._origins = explainer.origins
        self._upstream = Upstream(explainer)
        self._groups = explainer.groups

    def trace(self, culprit: Culprit, cause: OperatorCause) -> Culprit:
        """Return the record of a cause with the lines from which it may come."""
        cause = name_number(self._alignment, self._one, cause)
        if cause.launch is not None:
            return culprit
        if culprit.mechanism == "written":
            return culprit.model_copy(update={"origins": self._upstream.find_branches(cause)})
        if culprit.mechanism == "block":
            made = self._operation(self._upstream.find_maker(cause.ops[0]))
            origins = self._upstream.find_made(cause.ops[0])[1:]
            return culprit.model_copy(update={"here": made, "origins": origins, "others": ()})
        shown = (culprit.here, culprit.there, culprit.made, *culprit.moves, *culprit.moves_there)
        named = {line_of(each) for each in shown if each is not None and each.line is not None}
        target, later = cause.targets[0], []
        if culprit.mechanism == "moved" and culprit.here.step >= 0:
            later = self._origins.list_later(next(iter(target.values.values())), target.mark)
        is_number = culprit.mechanism == "number" and cause.repairs[0].kind != "number"  # a factor is named
        is_scaled = culprit.mechanism == "scale" or is_number
        origins = self._upstream.find(
            cause,
            self._list_taken(cause),
            named,
            lacks=later,
            defines=culprit.mechanism not in _OF_TENSORS,
            scaler=self._find_scaler(cause) if is_scaled else None,
        )
        return culprit.model_copy(update={"origins": origins})

    def _list_taken(self, cause: OperatorCause) -> list[At]:
        """Return the operands that a repair replaces, and the values that pass created elements on."""
        edit = cause.repairs[0] if cause.repairs and cause.repairs[0].kind != "value" else None
        if edit is None:
            return []
        passed = [at for op in edit.path for at in self._joint.results(op)]
        return [at for at in (*edit.changes.values, *passed) if at[0] == cause.ops[0][0]]

    def make_makers(self) -> dict[str, Culprit]:
        """Return the operation of user code that made each named tensor before the first step, on any rank."""
        found: dict[str, Culprit] = {}
        for rank, program in enumerate(self._joint.programs):
            for value in program.values:
                at = (rank, value.op)
                if not value.label or value.label in found or self._joint.op(at).step >= 0:
                    continue
                if origins := self._upstream.find_made(at):
                    place = Culprit(mechanism="place", proved=False, here=self._operation(at))
                    absent = self._list_absent(value.label)
                    found[value.label] = place.model_copy(update={"origins": origins, "absent": absent})
        return found

    def list_reduced_modules(self) -> frozenset[str]:
        """Return the modules that compute parts of sums, which a collective then adds up to right values."""
        return list_reduced_modules(self._alignment)

    def _list_absent(self, name: str) -> tuple[tuple[int, int, int], ...]:
        """Return (dim, first, stop) of the runs of a tensor's indices that no rank has before the first step."""
        regions = [
            shown.region
            for program in self._joint.programs
            for mark, parts in program.marks.items()
            for shown in parts
            if mark[0] == SETUP and mark[2] == name
        ]
        found: list[tuple[int, int, int]] = []
        if not regions or any(region.flat is not None for region in regions):
            return ()
        for dim, size in enumerate(regions[0].shape):
            held = {index for region in regions for index in region.dims[dim]}
            absent = [index for index in range(size) if index not in held]
            starts = [index for index in absent if index - 1 not in absent]
            stops = [index + 1 for index in absent if index + 1 not in absent]
            found += [(dim, first, stop) for first, stop in zip(starts, stops, strict=True)]
        return tuple(found[:_MOST_OTHERS])

    def make(self, cause: OperatorCause) -> Culprit:
        """Return the record of a cause."""
        cause = name_number(self._alignment, self._one, cause)
        first = cause.ops[0]
        edit = cause.repairs[0] if cause.repairs else None
        other = None if edit is None else edit.other
        others = {self._operation(at): None for at in cause.ops}
        here = self._operation(first)
        is_known = cause.known != "" and (edit is None or edit.kind == "value")
        # A known relation of the results to single-device values says more than a replaced value.
        mechanism = cause.known if cause.known and is_known else "place" if edit is None else edit.kind
        culprit = Culprit(
            mechanism=mechanism,
            proved=is_known or (edit is not None and edit.kind != "value"),
            here=here,
            there=None if other is None else describe_op(self._one.program, other),
            ranks=tuple(sorted({rank for rank, _ in cause.ops})),
            repaired=tuple(dict.fromkeys(cause.repaired))[:_MOST_REPAIRED],
            residual=cause.residual,
            sums=cause.sums,
            is_local=cause.is_local,
            between=self._list_between(cause) if edit is None or edit.kind in ("value", "created") else (),
            others=tuple(each for each in others if each.line is not None and line_of(each) != line_of(here))[
                :_MOST_OTHERS
            ],
        )
        if mechanism == "place" and here.step < 0:
            writer = self._find_usual_writer(first)
            if writer is not None:
                return culprit.model_copy(update={"mechanism": "written", "proved": True, "made": writer})
        if cause.launch is not None:
            return culprit.model_copy(update={"there": self._operation(cause.launch), "proved": True})
        if is_known:
            return culprit.model_copy(update=self._describe_known(cause))
        update = self._find_doubtful(first) if edit is None else self._describe(first, edit)
        if mechanism in ("total", "removed") and not here.module:  # such as in the norm of gradients
            own = [op for op in cause.ops if op[0] == first[0]]
            update["results"] = tuple(dict.fromkeys(list_reduced(self._joint, own)))
        return culprit.model_copy(update=update)

    def _find_group(self, op: At) -> Operation | None:
        """Return the call of user code that made the group of a collective, or that took it from a mesh."""
        program, meeting = self._joint.programs[op[0]], self._joint.op(op).meeting
        calls = () if meeting is None else program.groups.get(meeting.group.name, ())
        return next((describe_call("group", sites) for sites in calls), None)

    def _find_doubtful(self, op: At) -> dict[str, Any]:
        """Return fields of an operand that is a multiple of a value of one device, or one of an earlier step.

        Such values are known, and may be right: a layout scales the loss, and a state stays as it is.
        """
        for at in self._joint.own_reads(op):
            source = self._source(at) if self._joint.value(at).is_floating else None
            is_earlier = (
                source is not None and not source.label and 0 <= source.step < self._joint.op(op).step
            )
            if source is not None and (source.scale != 1.0 or is_earlier):
                return {"operand": _find_place(self._joint.op(op), at[1]), "taken": source}
        return {}

    def _describe_known(self, cause: OperatorCause) -> dict[str, Any]:
        """Return fields of a culprit for results that relate to single-device values."""
        target = cause.targets[0]
        at = next(iter(target.values.values()))
        found: dict[str, Any] = {"taken": self._source(at), "between": self._list_between(cause)}
        found["results"] = ("/".join(target.mark[1:]),)
        if cause.known == "shared":
            return found | {"copy_of": find_shared(self._alignment, target)}
        if cause.known == "scale":
            maker = self._find_scaling(cause, at)
            found |= {"factor": cause.factor, "axes": self._name_factor(cause.factor, maker)}
            found["here"] = self._operation(maker)
            found["made"] = self._find_whole(maker)
        elif found["taken"] is not None:
            found["axes"] = found["taken"].over
            if cause.known == "moved":
                found["copy_of"] = self._find_original(target, at)
            if cause.known == "moved" and not found["taken"].others:
                found["moves_there"] = self._origins.describe_later(at, target.mark)
        if cause.known == "reduction" and not (cause.sums or found.get("axes")):
            found["axes"] = self.name_over(tuple(target.values.values()))  # replicas that add up
        return found

    def _find_whole(self, op: At) -> Operation | None:
        """Return the operation that made the value that each rank adds whole to a collective's sum, or None."""
        made = find_whole(self._alignment, op)
        return None if made is None else self._operation(made)

    def _find_original(self, target: Target, at: At) -> str:
        """Return the right result of the same kind that has the elements of a moved result, or an empty string."""
        roots, kind = self._origins.roots_of(at), target.mark[1]
        marks = {each.mark: self._one.program.marks[each.mark][-1].value for each in self._right}
        found = [mark for mark, own in marks.items() if own is not None and self._one.roots_of(own) == roots]
        return next(("/".join(each[1:]) for each in found if each[1] == kind and each != target.mark), "")

    def _find_stale(self, op: At, edit: Edit) -> SourceValue | None:
        """Return a value of an earlier step that an operator takes and that its removal leaves out, or None."""
        taken = [at for at in self._joint.own_reads(op) if self._joint.value(at).is_floating]
        found = [self._source(at) for place, at in enumerate(taken) if place != (edit.place or (0,))[0]]
        return next(
            (each for each in found if each is not None and 0 <= each.step < self._joint.op(op).step), None
        )

    def _find_scaler(self, cause: OperatorCause) -> At:
        """Return the operator that makes a value of a cause a multiple of the right one."""
        if cause.known == "scale":
            return self._find_scaling(cause, next(iter(cause.targets[0].values.values())))
        return self._origins.trace_scale(next(iter(cause.repairs[0].changes.values)), of_parts=True)[1]

    def _find_scaling(self, cause: OperatorCause, at: At) -> At:
        """Return the first operator whose result has the factor of a scaled result: the suspect, or a later one."""
        first = cause.ops[0]
        factor, maker = self._origins.trace_scale(at)
        known = [self._alignment.find(at) for at in self._joint.results(first)]
        has_factor = any(each is not None and math.isclose(each.scale, cause.factor) for each in known)
        own = self._alignment.find(at)
        # The factor of the right value, or of another value of which the result is an exact multiple.
        scales = [cause.factor] if own is None else [cause.factor, own.scale]
        scales += [power for each in scales for power in (each * each, math.sqrt(abs(each)))]  # through x * x
        is_known = any(math.isclose(factor, each, rel_tol=1e-9) for each in scales)
        is_known = is_known and not is_own_op(self._joint, maker)
        is_number = math.prod(self._joint.value(at).shape) == 1  # any number is a multiple of any other
        return maker if is_known and not (has_factor or is_number) else first

    def _find_usual_writer(self, first: At) -> Operation | None:
        """Return the operation that wrote most weights and buffers that are right before the first step.

        None if no single function wrote most of them, or if it wrote the wrong ones too.
        """
        wrong, right = find_targets(self._joint, self._one.program, SETUP)
        writers = [self._list_writers(target, first[0]) for target in right]
        counts = Counter(function for each in writers for function in each)
        own = {(site.file, site.function) for site in self._joint.op(first).sites[:1]}
        own |= {function for target in wrong for function in self._list_writers(target, first[0])}
        usual = [each for each, count in counts.most_common() if 2 * count > len(writers) and each not in own]
        return next((each[function] for function in usual for each in writers if function in each), None)

    def _list_writers(self, target: Target, rank: int) -> dict[tuple[str, str], Operation]:
        """Return the operations that wrote to the memory of a rank's value, by their function."""
        values = [at for at in target.values.values() if at[0] == rank]
        written = [at for at in list_chain(self._joint, values) if self._joint.op(at).written]
        found: dict[tuple[str, str], Operation] = {}
        for op in written:
            for site in self._joint.op(op).sites[:1]:
                found.setdefault((site.file, site.function), self._operation(op))
        return found

    def _name_factor(self, factor: float, maker: At) -> tuple[str, ...]:
        """Return the names of sizes that equal a factor or its inverse.

        Empty in the optimizer's step, where other rates occur.
        """
        op = self._joint.op(maker)
        if op.phase == "step" or op.short.rstrip("_") in _ADDING:
            return ()
        return tuple(
            name
            for name, size in self._sizes.items()
            if size != 1.0 and any(math.isclose(factor, each, rel_tol=1e-9) for each in (size, 1 / size))
        )

    def _operation(self, at: At) -> Operation:
        return describe_at(self._joint, at)

    def _list_between(self, cause: OperatorCause) -> tuple[Operation, ...]:
        """Return the operations from right inputs to the first wrong result, one for each source line."""
        first = cause.ops[0]
        if cause.repairs and cause.repairs[0].path:
            return join(self._operation(at) for at in cause.repairs[0].path if at[0] == first[0])[
                :_MOST_BETWEEN
            ]
        moves = [each for at in self._joint.reads(first) for each in list_chain(self._joint, [at])]
        stretch = [at for at in cause.stretch if at[0] == first[0]]
        order = sorted({*(at for at in moves if at[0] == first[0]), first, *stretch}, key=self._joint.place)
        users = [at for at in order if not is_own_op(self._joint, at)]
        return join(map(self._operation, users or order))[-_MOST_BETWEEN:]

    def _describe(self, first: At, edit: Edit) -> dict[str, Any]:
        """Return fields of a culprit that describe an edit."""
        op, other = self._joint.op(first), edit.other
        if edit.kind == "returned" and other is not None:
            return self._describe_returned(first, other)
        if edit.kind == "scale":
            return self._describe_unscaled(first, *next(iter(edit.changes.values.items())))
        if edit.kind in ("removed", "dtype"):
            narrow = "".join(here for here, _ in edit.numbers)
            over = self._name_sum(first)
            stale = None if narrow else self._find_stale(first, edit)
            return {"rounds_to": narrow, "taken": stale, "axes": over}
        if edit.kind in ("group", "unreduced", "number", "created", "block", "owned"):
            axes = _list_axes(edit)
            names = tuple(map(str, edit.place)) if edit.kind in ("block", "unreduced") else ()
            numbers = edit.numbers or list_differences(op, other)
            made = self._find_group(first) if edit.place == (EVERYWHERE,) else None
            return {"numbers": numbers, "axes": axes, "results": names, "made": made}
        taken = next((at for at in edit.changes.values if at[0] == first[0]), None)
        if taken is None or edit.kind == "value":
            return {}
        found: dict[str, Any] = {"operand": _find_place(op, taken[1]), "taken": self._source(taken)}
        if found["taken"] is not None:
            found["axes"] = found["taken"].over
        if edit.kind == "inserted":
            name, number = edit.place[1], int(edit.place[2])
            found["right"] = self._source((first[0], number))
            found["numbers"] = ((str(name), ""),)
        elif edit.kind == "share":
            parts = map(self._alignment.list_parts, self._joint.own_reads(first))
            found["axes"] = self.name_over([each for part in parts for each in part])
            found["made"] = self._operation(find_first_linear(self._joint, taken))
        elif edit.kind in ("operand", "whole") and other is not None:
            pair = find_pair(op, other, edit.place)
            if pair is not None:
                # A part of a value may be a multiple of the value of another place.
                factor, maker = self._origins.trace_scale(taken)
                is_scaled = factor != 1.0 and may_scale(self._joint, maker)
                if edit.kind == "operand" and is_scaled and self._origins.is_made_of(pair.theirs, taken):
                    found |= self._describe_scale(factor, maker)
                else:
                    found |= self._describe_operand(first, taken, pair.theirs, edit.changes.values[taken])
        return found

    def _name_sum(self, op: At) -> tuple[str, ...]:
        """Return the name of the ranks over which an operator reduces, or over which a copied result was reduced."""
        joint = self._joint
        copied = joint.own_reads(op) if joint.op(op).short == "copy_" else ()
        makers = [op, *(joint.maker(skip_moves(joint, at)) for at in copied)]
        met = [meeting for each in makers if (meeting := joint.op(each).meeting) is not None]
        return tuple(name_ranks(self._groups, each.group.ranks) for each in met[:1])

    def _describe_unscaled(self, first: At, taken: At, right: Tensor) -> dict[str, Any]:
        """Return fields of a scaled operand: the operator that scales it, or the operand if right results need it."""
        factor, maker = self._origins.trace_scale(taken, of_parts=True)
        data = self._alignment.data(taken)
        if factor == 1.0 and data is not None:  # known as a multiple only among the results of the search
            place = int(right.abs().argmax())
            factor = float(data.flatten()[place] / right.flatten()[place])
        source = self._source(taken)
        if source is None or may_scale(self._joint, maker):
            return self._describe_scale(factor, maker)
        unscaled = source.model_copy(update={"scale": 1.0})
        found = {"operand": _find_place(self._joint.op(first), taken[1]), "taken": source, "right": unscaled}
        return found | {"mechanism": "operand", "others": ()}

    def _describe_scale(self, factor: float, maker: At) -> dict[str, Any]:
        """Return the operator that introduces a factor, or the other number that it takes on one device."""
        own = {"here": self._operation(maker), "made": self._find_whole(maker)}
        found = own | {"operand": -1, "taken": None, "others": ()}
        other = find_alike(self._alignment, self._one, maker)
        if other is not None:
            numbers = list_differences(self._joint.op(maker), other)
            there = describe_op(self._one.program, other)
            return found | {"mechanism": "number", "numbers": numbers, "there": there, "axes": ()}
        scale = {"mechanism": "scale", "factor": factor, "there": None}
        return found | scale | {"axes": self._name_factor(factor, maker)}

    def _describe_returned(self, maker: At, other: Op) -> dict[str, Any]:
        """Return fields for a module that returns another value than on the single device."""
        end, *_ = self._landmarks.list_ends(self._joint, maker)
        module, *_ = self._landmarks.by_rank[end[0]][end[1]]
        right = describe_value(self._one.program, other.results[0])
        return {"taken": self._source(end), "right": right, "results": (module,)}

    def _describe_operand(self, reader: At, taken: At, theirs: int, wanted: Tensor) -> dict[str, Any]:
        """Return fields for a wrong operand, traced back to the first operator that takes a wrong one.

        `wanted` is the right value of the operand.
        """
        found: dict[str, Any] = {}
        zeroed = self._origins.trace_zeros(taken, wanted)
        while (before := self._origins.trace_operand(taken, theirs)) is not None:
            reader, taken, theirs = before
            found = {
                "here": self._operation(reader),
                "operand": _find_place(self._joint.op(reader), taken[1]),
            }
            found |= {"there": describe_op(self._one.program, self._one.reader(theirs)), "others": ()}
        found |= {"taken": self._source(taken), "right": describe_value(self._one.program, theirs)}
        known = self._alignment.find(taken)
        mine = self._one.list_rows(theirs, None if known is None else known.ids)
        own = self._one.roots_of(theirs)
        right = self._one.list_rows(theirs, self._one.elements.find(wanted, lambda root: root not in own))
        if found["taken"] is not None and mine and right and set(mine).isdisjoint(right):
            for place, rows in (("taken", mine), ("right", right)):
                found[place] = found[place].model_copy(update={"rows": rows[:_MOST_OTHERS]})
        zeros = self._origins.count_zeros(taken, theirs)
        if found["taken"] is not None and zeros > _LEAST_SHARE:
            found["taken"] = found["taken"].model_copy(update={"zeros": zeros})
        made = zeroed if zeros > _LEAST_SHARE else None
        skip = skip_sums if found["taken"] is None else skip_moves
        maker = made or self._joint.maker(skip(self._joint, taken))
        if self._joint.op(maker).short not in HIDDEN:
            found["made"] = self._operation(maker)
        return found | self._origins.list_moves(taken, theirs)

    def _source(self, at: At) -> SourceValue | None:
        """Return the single-device value that a rank's value equals, or None."""
        known = self._alignment.find(at)
        if known is None or known.ids is None:
            return None
        shares = self._one.elements.shares(known.ids)
        if not shares:
            return None
        main = next(iter(shares))
        mixed = [root for root, share in shares.items() if share > _LEAST_SHARE and root != main]
        found, *further = (describe_value(self._one.program, root) for root in (main, *mixed))
        others = {name_of(each): each for each in further if name_of(each) != name_of(found)}
        return found.model_copy(
            update={
                "over": self.name_over(known.over),
                "scale": known.scale,
                "others": tuple(others.values())[:_MOST_MIXED],
            }
        )

    def name_over(self, over: Sequence[At]) -> tuple[str, ...]:
        """Return the mesh axis over which values are summed, and "micro-batches" for several per rank.

        If no axis has these ranks, as in a mesh of the user, return the ranks.
        """
        if not over:
            return ()
        ranks = {rank for rank, _ in over}
        found = (name_ranks(self._groups, list(ranks)),) if len(ranks) > 1 else ()
        return found + (("micro-batches",) if len(over) > len(ranks) else ())


def _list_axes(edit: Edit) -> tuple[str, ...]:
    """Return the mesh axes that an edit names."""
    if edit.kind == "group" and edit.place[:1] == (RING,):
        return (str(edit.place[1]),)
    first = {"group": 0, "unreduced": 1, "block": 0}.get(edit.kind, 2)  # of a pair (axis or reduction, axis)
    names = filter(None, edit.numbers[0][first:] if edit.numbers else ())
    return tuple(dict.fromkeys(axis for name in names for axis in name.split(AND)))


def _find_place(op: Op, number: int) -> int:
    """Return the position of a value among an operator's operands, or -1."""
    numbers = list(op.refs())
    return numbers.index(number) if number in numbers else -1
