"""Causes as records: the operators and values that they are about, by their names and lines."""

from __future__ import annotations

import linecache
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moeverify.explain.cause import Cause
from moeverify.explain.chains import is_of_masks, is_passing, list_chain
from moeverify.explain.counterparts import pair_tensors
from moeverify.explain.edits import Edit
from moeverify.explain.explain import Explainer
from moeverify.explain.joint import At, Changes, Joint
from moeverify.explain.program import BATCH, LEAF, READ, SETUP, UNSEEN, Op, Program, Site, list_refs
from moeverify.explain.sites import is_own
from moeverify.explain.suspects import Target, find_targets
from moeverify.results.culprit import CodeLine, Culprit, Operation, Source

_AROUND = 1
"""How many lines of the file are shown before and after a call."""

_SCALING = frozenset({"mul", "div", "mean", "sum", "reciprocal"})
"""Operators whose factor may be a size of the run."""

_MOST_MOVES = 3
_MOST_REPAIRED = 20
_MOST_OTHERS = 4
_MOST_MIXED = 2
_LEAST_SHARE = 0.05
"""Least share of the elements of a mix for which a value is named."""
_MOST_BETWEEN = 12
_HIDDEN = frozenset({LEAF, READ, UNSEEN})

Groups = Mapping[str, Sequence[Sequence[int]]]


class Culprits:
    """Makes the records of causes. `groups` has the rank groups of each mesh axis, `sizes` named sizes of the run."""

    def __init__(
        self, explainer: Explainer, groups: Groups, sizes: Mapping[str, float] | None = None
    ) -> None:
        self._sizes = dict(sizes or {})
        self._landmarks = explainer.landmarks
        self._alignment, self._joint, self._one = explainer.alignment, explainer.joint, explainer.one
        self._groups = groups

    def make(self, cause: Cause) -> Culprit:
        """Return the record of a cause."""
        first = cause.ops[0]
        edit = cause.repairs[0] if cause.repairs else None
        other = None if edit is None else edit.other
        others = {self._operation(at): None for at in cause.ops}
        here = self._operation(first)
        is_known = cause.known != "" and (edit is None or edit.kind == "value")
        # Where the results are known to be values of one device, that says more than a replaced value.
        mechanism = cause.known if cause.known and is_known else "place" if edit is None else edit.kind
        culprit = Culprit(
            mechanism=mechanism,
            proved=is_known or (edit is not None and edit.kind != "value"),
            here=here,
            there=None if other is None else describe_op(self._one.program, other),
            ranks=tuple(sorted({rank for rank, _ in cause.ops})),
            repaired=tuple(dict.fromkeys(cause.repaired))[:_MOST_REPAIRED],
            residual=cause.residual,
            is_local=cause.is_local,
            between=() if edit is not None and edit.kind != "value" else self._list_between(cause),
            others=tuple(each for each in others if each.line is not None and _line(each) != _line(here))[
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
        return culprit if edit is None else culprit.model_copy(update=self._describe(first, edit))

    def _describe_known(self, cause: Cause) -> dict[str, Any]:
        """Return how the wrong results relate to values of one device, as fields of a culprit."""
        target = cause.targets[0]
        at = next(iter(target.values.values()))
        found: dict[str, Any] = {"taken": self._source(at), "between": self._list_between(cause)}
        found["results"] = ("/".join(target.mark[1:]),)
        if cause.known == "scale":
            found["factor"] = cause.factor
            found["axes"] = self._name_factor(cause.factor, cause.ops[0])
        elif found["taken"] is not None:
            found["axes"] = found["taken"].over
        return found

    def _find_usual_writer(self, first: At) -> Operation | None:
        """Return the operation that wrote most of the weights and buffers that are right before the first step.

        None if no function wrote most of them, or if it wrote the wrong ones too.
        """
        wrong, right = find_targets(self._joint, self._one.program, SETUP)
        writers = [self._list_writers(target, first[0]) for target in right]
        counts = Counter(function for each in writers for function in each)
        own = {(site.file, site.function) for site in self._joint.op(first).sites[:1]}
        own |= {function for target in wrong for function in self._list_writers(target, first[0])}
        usual = [each for each, count in counts.most_common() if 2 * count > len(writers) and each not in own]
        return next((each[function] for function in usual for each in writers if function in each), None)

    def _list_writers(self, target: Target, rank: int) -> dict[tuple[str, str], Operation]:
        """Return the operations that wrote into the memory of a rank's value, by their function."""
        values = [at for at in target.values.values() if at[0] == rank]
        written = [at for at in list_chain(self._joint, values) if self._joint.op(at).written]
        found: dict[tuple[str, str], Operation] = {}
        for op in written:
            for site in self._joint.op(op).sites[:1]:
                found.setdefault((site.file, site.function), self._operation(op))
        return found

    def _name_factor(self, factor: float, maker: At) -> tuple[str, ...]:
        """Return the names of sizes that a factor or its inverse equals; none in the step, which has other rates."""
        op = self._joint.op(maker)
        if op.phase == "step" or not (op.meeting is not None or op.short.rstrip("_") in _SCALING):
            return ()
        return tuple(
            name
            for name, size in self._sizes.items()
            if size != 1.0 and any(math.isclose(factor, each, rel_tol=1e-9) for each in (size, 1 / size))
        )

    def _operation(self, at: At) -> Operation:
        return describe_op(self._joint.programs[at[0]], self._joint.op(at))

    def _list_between(self, cause: Cause) -> tuple[Operation, ...]:
        """Return the operations from right inputs to the first wrong result, one for each line of code."""
        first = cause.ops[0]
        moves = [each for at in self._joint.reads(first) for each in list_chain(self._joint, [at])]
        stretch = [at for at in cause.stretch if at[0] == first[0]]
        order = sorted({*(at for at in moves if at[0] == first[0]), first, *stretch}, key=self._joint.place)
        users = [
            at
            for at in order
            if not all(map(is_own, self._joint.programs[at[0]].sites_of(self._joint.op(at))[:1]))
        ]
        return _join(map(self._operation, users or order))[-_MOST_BETWEEN:]

    def _describe(self, first: At, edit: Edit) -> dict[str, Any]:
        """Return what an edit changes, as fields of a culprit."""
        op, other = self._joint.op(first), edit.other
        if edit.kind == "returned" and other is not None:
            return self._describe_returned(first, other)
        if edit.kind == "number":
            return {"numbers": edit.numbers or list_differences(op, other)}
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
        elif edit.kind in ("operand", "whole") and other is not None:
            pairs = pair_tensors(op, other)
            theirs = next((pair.theirs for pair in pairs if pair.place == edit.place), None)
            if theirs is not None:
                found |= self._describe_operand(first, taken, theirs)
        return found

    def _describe_returned(self, maker: At, other: Op) -> dict[str, Any]:
        """Return the value that a module returns on the ranks, and the one that it returns on one device."""
        end, *_ = self._landmarks.list_ends(self._joint, maker)
        module, *_ = self._landmarks.by_rank[end[0]][end[1]]
        right = describe_value(self._one.program, other.results[0])
        return {"taken": self._source(end), "right": right, "results": (module,)}

    def _describe_operand(self, reader: At, taken: At, theirs: int) -> dict[str, Any]:
        """Return the origin of a wrong operand: it is traced back to the first operator that takes a wrong one."""
        factor, maker = self._trace_scale(taken)
        if factor != 1.0 and self._is_made_of(theirs, taken):
            return {
                "mechanism": "scale",
                "here": self._operation(maker),
                "factor": factor,
                "axes": self._name_factor(factor, maker),
                "operand": -1,
                "taken": None,
                "others": (),
            }
        found: dict[str, Any] = {}
        while (before := self._trace_operand(taken, theirs)) is not None:
            reader, taken, theirs = before
            found = {
                "here": self._operation(reader),
                "operand": _find_place(self._joint.op(reader), taken[1]),
            }
            found |= {"there": describe_op(self._one.program, self._one.reader(theirs)), "others": ()}
        found |= {"taken": self._source(taken), "right": describe_value(self._one.program, theirs)}
        zeros = self._count_zeros(taken, theirs)
        if found["taken"] is not None and zeros > _LEAST_SHARE:
            found["taken"] = found["taken"].model_copy(update={"zeros": zeros})
        maker = self._joint.maker(self._skip_moves(taken))
        if self._joint.op(maker).short not in _HIDDEN:
            found["made"] = self._operation(maker)
        return found | self._describe_moves(taken, theirs)

    def _is_made_of(self, theirs: int, taken: At) -> bool:
        """Return whether a value has, or is computed from, elements of which a rank's operand is a multiple."""
        known = self._alignment.find(taken)
        if known is None or known.ids is None:
            return False
        operands = self._one.program.op_of(self._root_of(theirs)).reads()
        return any(self._one.holds(each, known.ids) for each in (theirs, *operands))

    def _count_zeros(self, mine: At, theirs: int) -> float:
        """Return the share of zeros in a value, minus that in the right value."""
        here, there = self._alignment.data(mine), self._one.data(theirs)
        if here is None or there is None or not here.numel() or not there.numel():
            return 0.0
        return float((here == 0).double().mean()) - float((there == 0).double().mean())

    def _trace_scale(self, taken: At) -> tuple[float, At]:
        """Return the factor of a value that is too large, and the first operator that introduces it.

        It is the first operator on the way that repairs the value if its result is divided by its factor. A program
        may correct an earlier factor by a later division.
        """
        known = self._alignment.find(taken)
        if known is None or known.over or known.scale == 1.0:
            return 1.0, self._joint.maker(taken)
        path = [(taken, known.scale)]
        while (before := self._find_scaled(self._joint.maker(path[-1][0]), path[-1][1])) is not None:
            path.append(before)
        for at, own in reversed(path):
            for scale in dict.fromkeys(
                (own, math.sqrt(abs(known.scale)))
            ):  # a square has the square of the factor
                if self._is_repaired(taken, at, scale):
                    return scale, self._joint.maker(at)
        return known.scale, self._joint.maker(taken)

    def _is_repaired(self, taken: At, at: At, scale: float) -> bool:
        """Return whether a value becomes right when an earlier one is divided by a factor."""
        data = self._alignment.data(at)
        if data is None:
            return False
        done = self._joint.execute(Changes(values={at: data / scale}), [taken])
        found = None if taken in done.tainted else self._alignment.under(done).find(taken)
        return found is not None and math.isclose(found.scale, 1.0)

    def _find_scaled(self, maker: At, factor: float) -> tuple[At, float] | None:
        """Return the only operand of an operator that is a multiple of a right value, with its factor.

        `factor` is that of the result.
        """
        reads = dict.fromkeys(self._joint.reads(maker))  # a value may be taken twice, as in x * x
        found = [(at, known.scale) for at in reads if (known := self._alignment.find(at)) is not None]
        scaled = [(at, scale) for at, scale in found if scale != 1.0]
        if not scaled:
            # The multiple of a value may be equal to a later one: 2 * x is computed for the gradient of x * x.
            scaled = [
                (at, scale)
                for at in reads
                for scale in dict.fromkeys((factor, math.sqrt(abs(factor))))
                if self._is_multiple(at, scale)
            ]
        return scaled[0] if len(scaled) == 1 else None

    def _is_multiple(self, at: At, scale: float) -> bool:
        """Return whether a value of the forward pass is a multiple of one, if it has elements of a later pass."""
        known, data = self._alignment.find(at), self._alignment.data(at)
        op = self._joint.op(self._joint.maker(at))
        if known is None or known.ids is None or data is None or op.phase != "forward":
            return False
        roots = self._one.roots(known.ids)
        if not roots or self._one.program.op_of(roots[0]).phase == "forward":
            return False
        found = self._alignment.locate(data / scale, op)
        return found is not None and found.scale == 1.0

    def _trace_operand(self, taken: At, theirs: int) -> tuple[At, At, int] | None:
        """Return the operator that computed a value from an operand that differs, and this operand on both sides."""
        maker = self._joint.maker(self._skip_moves(taken))
        known = self._alignment.find(taken)
        is_named = (
            known is not None
            and known.ids is not None
            and known.scale == 1.0
            and self._one.label(known.ids) != ""
        )
        # It has elements of the right operand: the operations that moved them are wrong, not the computation.
        is_mixed = not set(self._root(taken)).isdisjoint(self._one.roots_of(theirs))
        if is_named or is_mixed or self._joint.op(maker).step < 0:
            return None
        other = self._one.program.ops[self._one.maker(self._root_of(theirs))]
        op = self._joint.op(maker)
        if op.short != other.short or op.meeting is not None or not list(op.reads()):
            return None
        others = []
        for pair in pair_tensors(op, other):
            known = self._alignment.find((maker[0], pair.mine))
            if known is None or known.over:
                return None
            if known.ids is not None and not self._one.holds(pair.theirs, known.ids):
                others.append(((maker[0], pair.mine), pair.theirs))
        # The earliest: the others may be computed from it.
        return (maker, *min(others, key=lambda each: self._joint.maker(each[0])[1])) if others else None

    def _skip_moves(self, at: At) -> At:
        """Follow moves back to the value that was computed."""
        while is_passing(self._joint, self._joint.maker(at)):
            reads = self._joint.reads(self._joint.maker(at))
            sources = [each for each in reads if not is_of_masks(self._joint, each)]
            if len(sources) != 1:
                break
            at = sources[0]
        return at

    def _root_of(self, number: int) -> int:
        roots = self._one.roots_of(number)
        return roots[0] if roots else number

    def _describe_moves(self, mine: At, theirs: int) -> dict[str, Any]:
        """Return the moves of an operand since it was computed, on the ranks and on one device, if they differ."""
        here = list_chain(self._joint, [mine])
        there = list_chain(self._one_joint, [(0, theirs)])
        while here and there and self._is_alike(here[-1], there[-1]):
            here, there = here[:-1], there[:-1]
        here, there = self._drop_common(here, there)
        numbers = [
            pair
            for one in here
            for two in there
            if self._is_same_line(one, two)
            for pair in _list_numbers(self._joint.op(one), self._one_joint.op(two))
        ]
        mine_all = _join(self._operation(each) for each in reversed(here))
        others = _join(describe_op(self._one.program, self._one_joint.op(each)) for each in reversed(there))
        is_same = self._root(mine) == self._one.roots_of(theirs)
        if is_same and not others and (order := self._list_reorder(mine)):
            return {"moves": order[-_MOST_MOVES:]}
        kept = slice(_MOST_MOVES) if is_same else slice(-_MOST_MOVES, None)
        found: dict[str, Any] = {"moves": mine_all[kept], "moves_there": others[kept]}
        return found | ({"numbers": tuple(dict.fromkeys(numbers))} if numbers else {})

    def _is_alike(self, mine: At, theirs: At) -> bool:
        """Return whether two operators are the same with the same options, and no results show a difference."""
        op, other = self._joint.op(mine), self._one_joint.op(theirs)
        return _is_alike(op, other) and not self._differs(mine, theirs)

    def _differs(self, mine: At, theirs: At) -> bool:
        """Return whether whole numbers or masks of one shape differ."""
        for number, other in zip(
            self._joint.op(mine).results, self._one_joint.op(theirs).results, strict=False
        ):
            here, there = self._joint.data((mine[0], number)), self._one.data(other)
            if here is not None and there is not None and not here.is_floating_point():
                return here.shape == there.shape and not torch.equal(here, there)
        return False

    def _drop_common(self, here: Sequence[At], there: Sequence[At]) -> tuple[list[At], list[At]]:
        """Return two chains without the calls that both have: the same line, options and, if comparable, results."""
        pairs = {
            one: two
            for one in here
            for two in there
            if self._is_same_line(one, two)
            and not _list_numbers(self._joint.op(one), self._one_joint.op(two))
            and not self._differs(one, two)
        }
        found = [each for each in here if each not in pairs]
        others = [each for each in there if each not in pairs.values()]
        return (found, others) if found or others else (list(here), list(there))

    def _is_same_line(self, mine: At, theirs: At) -> bool:
        sites = self._joint.programs[mine[0]].sites_of(self._joint.op(mine))[:1]
        return sites == self._one.program.sites_of(self._one_joint.op(theirs))[:1]

    def _list_reorder(self, taken: At) -> tuple[Operation, ...]:
        """Return the moves that first put the rows of a value into another order, if it has that shape already.

        A module may compute rows in any order, and return them in the order in which it got them.
        """
        joint, shape = self._joint, self._joint.value(taken).shape
        first = joint.op(joint.maker(taken))
        if not self._is_reordered(taken):
            return ()
        for op in sorted(joint.list_before([taken]), key=joint.place):
            recorded = joint.op(op)
            if op[0] != taken[0] or (recorded.step, recorded.phase) != (first.step, first.phase):
                continue
            for number in recorded.results:
                at = (op[0], number)
                if joint.value(at).shape == shape and self._is_reordered(at):
                    chain = list_chain(joint, [at]) or [op]
                    return _join(self._operation(each) for each in reversed(chain))
        return ()

    def _is_reordered(self, at: At) -> bool:
        """Return whether a value has the elements of one value of one device in another order."""
        known = self._alignment.find(at) if self._joint.value(at).is_floating else None
        if known is None or known.ids is None or known.over or self._one.label(known.ids):
            return False
        if len(self._one.roots(known.ids)) != 1:
            return False
        flat = known.ids.reshape(-1)
        flat = flat[flat > 0]
        return bool((flat.diff() < 0).any())

    def _root(self, at: At) -> list[int]:
        known = self._alignment.find(at)
        return [] if known is None or known.ids is None else self._one.roots(known.ids)

    @cached_property
    def _one_joint(self) -> Joint:
        return Joint([self._one.program])

    def _source(self, at: At) -> Source | None:
        """Return the value of one device that a rank's value equals; None if it is not known."""
        known = self._alignment.find(at)
        if known is None or known.ids is None:
            return None
        shares = self._one.elements.shares(known.ids)
        if not shares:
            return None
        main = next(iter(shares))
        mixed = [root for root, share in shares.items() if share > _LEAST_SHARE and root != main]
        found, *further = (describe_value(self._one.program, root) for root in (main, *mixed))
        others = {_name(each): each for each in further if _name(each) != _name(found)}
        return found.model_copy(
            update={
                "over": self.name_over(known.over),
                "scale": known.scale,
                "others": tuple(others.values())[:_MOST_MIXED],
            }
        )

    def name_over(self, over: Sequence[At]) -> tuple[str, ...]:
        """Return the mesh axes over which values are summed."""
        if not over:
            return ()
        ranks = sorted({rank for rank, _ in over})
        found = [
            axis for axis, groups in self._groups.items() if any(sorted(group) == ranks for group in groups)
        ]
        return tuple(found[:1]) + (("micro-batches",) if len(over) > len(ranks) else ())


def describe_op(program: Program, op: Op) -> Operation:
    """Return an operator with the lines that call it."""
    sites = program.sites_of(op)
    callers = sites[1:] if sites and is_own(sites[0]) else [site for site in sites[1:] if not is_own(site)]
    return Operation(
        operator=op.short,
        line=make_line(sites[0]) if sites else None,
        callers=tuple(make_line(site).model_copy(update={"lines": ()}) for site in callers),
        module=op.module,
        phase=op.phase,
        step=op.step,
        is_derivative=not op.sites and op.origin >= 0,
    )


def describe_value(program: Program, number: int) -> Source:
    """Return a value by its name, or by the operation that made it."""
    value = program.values[number]
    while value.alias >= 0 and not value.label:
        value = program.values[value.alias]
    op = program.ops[value.op]
    return Source(label=value.label.removeprefix(BATCH), operation=describe_op(program, op), step=op.step)


def make_line(site: Site) -> CodeLine:
    """Return a call with its expression and the lines of the file around it."""
    shown = [
        (number, text.rstrip())
        for number in range(site.line - _AROUND, site.line + _AROUND + 1)
        if (text := linecache.getline(site.file, number))
    ]
    return CodeLine(
        file=shorten(site.file),
        line=site.line,
        function=site.function,
        expression=read_expression(site),
        lines=tuple(shown),
    )


def read_expression(site: Site) -> str:
    """Return the source code of a call, in one line."""
    if site.span is None:
        return ""
    first, begin, last, end = site.span
    lines = [linecache.getline(site.file, number).encode() for number in range(first, last + 1)]
    if not all(lines):
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join(b" ".join(lines).decode(errors="replace").split())


def shorten(path: str) -> str:
    """Return a file's path relative to the folder that it is imported from."""
    file = Path(path)
    roots = [Path(each).resolve() for each in ["", *sys.path]]
    inside = [root for root in roots if file.is_relative_to(root)]
    return str(file.relative_to(max(inside, key=lambda each: len(each.parts)))) if inside else path


def list_differences(op: Op, other: Op | None) -> tuple[tuple[str, str], ...]:
    """Return the arguments that are no tensors and differ between two calls of one operator."""
    if other is None:
        return ()
    pairs = list(zip(op.args, other.args, strict=False))
    pairs += [(op.kwargs.get(name), other.kwargs.get(name)) for name in {**op.kwargs, **other.kwargs}]
    return tuple(
        (str(mine), str(theirs))
        for mine, theirs in pairs
        if not (list(list_refs([mine, theirs])) or str(mine) == str(theirs))
    )


def _name(source: Source) -> object:
    """Return a key that is equal for values which a report names alike."""
    line = source.operation.line if source.operation is not None else None
    return source.label or (line and (line.file, line.line, line.expression)), source.step


def _join(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return one operation for each line of code."""
    found: dict[tuple[str, int], Operation] = {}
    for each in operations:
        if each.line is not None and each.operator not in _HIDDEN:
            found.setdefault(_line(each), each)
    return tuple(found.values())


def _line(operation: Operation) -> tuple[str, int]:
    assert operation.line is not None
    return operation.line.file, operation.line.line


def _find_place(op: Op, number: int) -> int:
    """Return the position of a value among the operands of an operator."""
    numbers = list(op.refs())
    return numbers.index(number) if number in numbers else -1


def _is_alike(op: Op, other: Op) -> bool:
    return op.short == other.short and not list_differences(op, other)


def _list_numbers(op: Op, other: Op) -> list[tuple[str, str]]:
    """Return the numbers that differ between two calls of one operator, without sizes, which depend on the layout."""
    if op.short != other.short:
        return []
    return [
        pair for pair in list_differences(op, other) if not any(each.startswith(("[", "(")) for each in pair)
    ]
