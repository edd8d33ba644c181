"""Lines that one side alone executes, in functions that both sides execute.

A function takes another branch on the ranks than on one device: a difference that needs no recorded operator.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from moeverify.explain.agreement import Agreement
from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.chains import is_passing, list_chain, list_of_step, skip_moves, walk_back
from moeverify.explain.joint import At
from moeverify.explain.left_out import LeftOut, list_idle
from moeverify.explain.operators import is_blank
from moeverify.explain.program import SETUP, Op, Program, Site
from moeverify.explain.sites import find_line, is_of_user
from moeverify.explain.suspects import Target
from moeverify.explain.syntax import find_function
from moeverify.explain.user_lines import UserLines, make_origin
from moeverify.results.checks import Kind
from moeverify.results.culprit import Origin, OriginKind

Line = tuple[str, int]
"""(file, line)."""

_Block = tuple[Line, ...]
"""Lines one after another of one function, the first one first."""

_Branch = _Block | LeftOut

_Function = tuple[str, int]
"""(file, first line of the body)."""

_MOST_BRANCHES = 2
"""Maximum number of branches that are shown: among more, none stands out. Reports show three lines."""
_MOST_CALLS = 3
"""Maximum number of calls around an operator whose arguments are followed."""
_MOST_REPLACED = 32
"""Maximum number of operators that compute a value which a repair replaces."""
_MOST_FOLLOWED = 400
"""Maximum number of operators that are followed upstream."""
_MOST_USES = 16
"""Maximum number of values that are followed from a branch to the first combination with another value."""
_NEAREST = 3
"""Number of calls around an operation, the innermost first, whose lines may be wrong by themselves."""


class _Near:
    """The branches near an operation, those that were noted first in front: of ranks alone, and those left out.

    `found` has the line of each that was noted. Of `later` branches only the lines themselves count, and not their
    functions.
    """

    def __init__(
        self, blocks: Sequence[_Block], later: Collection[_Block], left_out: Sequence[LeftOut]
    ) -> None:
        self.block_of = {line: block for block in blocks for line in block}
        self.found: dict[_Branch, Line] = {}
        inside: list[_Branch] = [each for each in blocks if each not in later]
        self._inside = inside + list(left_out)
        self._left_out = left_out

    def note(self, lines: Sequence[Line]) -> None:
        """Note the branches of these lines, and those that the ranks leave out in their functions."""
        functions = {find_function(*line) for line in lines}
        for line in lines:
            if line in self.block_of:
                self.found.setdefault(self.block_of[line], line)
        self._add(each for each in self._left_out if each.function in functions)

    def note_in(self, functions: Collection[_Function]) -> None:
        """Note the branches in these functions."""
        self._add(each for each in self._inside if _function_of(each) in functions)

    def _add(self, branches: Iterable[_Branch]) -> None:
        for each in branches:
            self.found.setdefault(each, _first_line(each))


def _first_line(branch: _Branch) -> Line:
    return (branch.header.file, branch.header.line) if isinstance(branch, LeftOut) else branch[0]


def _function_of(branch: _Branch) -> _Function:
    return branch.function if isinstance(branch, LeftOut) else find_function(*branch[0])


class Branches:
    """Search for the branches that one side alone takes, in functions that both sides execute."""

    def __init__(
        self,
        agreement: Agreement,
        alignment: Alignment,
        one: Program,
        lines: UserLines,
        right: Sequence[Target],
    ) -> None:
        self._agreement, self._alignment, self._lines, self._right = agreement, alignment, lines, right
        self._joint, self._one = alignment.joint, one

    def list_nearest(self, cause: OperatorCause) -> list[Origin]:
        """Return the nearest branches of `find`. Those that ranks leave out or that start parallel code come last."""
        found = list(itertools.islice(self.find(cause), 2 * _MOST_BRANCHES))
        found.sort(key=lambda each: ("branch", "skipped", "parallel").index(each[0]))
        return [make_origin(kind, [site]) for kind, site in found[:_MOST_BRANCHES]]

    def find(self, cause: OperatorCause) -> Iterator[tuple[OriginKind, Site]]:
        """Yield lines of the branches that a cause may come from, the nearest to its first operation first.

        These are branches that make the call, of the function that makes it or that writes the result on one
        device, that compute operands, and of functions that call it. A branch that ranks leave out is shown by its
        condition.
        """
        first, target = cause.ops[0], cause.targets[0]
        sites, writers = self._sites(first), self._list_writers(target)
        enclosing = set(sites[_NEAREST:])  # such a line calls most of the step
        blocks = [each for each in self._list_possible(first, target) if enclosing.isdisjoint(each)]
        later = [block for block in blocks if self._is_later(block, cause)]
        near = _Near(blocks, later, self._list_left_out(first))
        replaced = set(map(self._joint.maker, self._list_replaced(cause)))

        def reads(op: At) -> list[At]:
            taken = self._joint.own_reads(op)
            if op in replaced and len(replaced) < _MOST_REPLACED:
                floating = [at for at in taken if self._joint.value(at).is_floating]
                replaced.update(map(self._joint.maker, list_of_step(self._joint, floating)))
                return taken
            return [at for at in taken if self._may_be_wrong(at, near.block_of)]

        near.note(sites)
        near.note_in({find_function(*line) for line in (*sites[:1], *writers[:1])})
        for starts in ([first, *replaced], [] if cause.known else cause.stretch):
            for op in walk_back(self._joint, starts, reads, _MOST_FOLLOWED):
                near.note(self._sites(op)[:_NEAREST])
        near.note_in({find_function(*line) for op in replaced for line in self._sites(op)[:1]})
        near.note_in({find_function(*line) for line in (*sites, *writers)})
        yield from self._name(near.found, first[0])
        if self._joint.op(first).phase == "step":  # the options and groups of an optimizer are set before
            before = [block for block in self._list_blocks(first[0], {SETUP}) if block not in near.found]
            yield from self._name(
                {each: each[0] for each in before if len(before) <= _MOST_BRANCHES}, first[0]
            )

    def _name(self, branches: Mapping[_Branch, Line], rank: int) -> Iterator[tuple[OriginKind, Site]]:
        """Yield the kind of each branch and its line, or the condition that leaves it out."""
        for each, line in branches.items():
            if isinstance(each, LeftOut):
                yield "skipped", each.header
            else:
                site = find_line(*line)
                yield "parallel" if self._starts_parallel(rank, site) else "branch", site

    def _list_left_out(self, first: At) -> list[LeftOut]:
        """Return the branches that ranks leave out, and that one device does not only execute after an operation."""
        step = self._joint.op(first).step
        before = set[Line]().union(*(lines for at, lines in self._one.lines.items() if at < step))

        def is_later(each: LeftOut) -> bool:
            calls = [line for line in self._sites(first) if find_function(*line) == each.function]
            is_after = bool(calls) and all(each.header.line > line for _, line in calls)
            return is_after and before.isdisjoint((each.header.file, line) for line in each.lines)

        return [each for each in self._lines.left_out if step < 0 or not is_later(each)]

    def _starts_parallel(self, rank: int, site: Site) -> bool:
        """Return whether a line runs a collective, or calls a function that one device does not execute.

        Such a line is there in a right program, too.
        """
        line = (site.file, site.line)
        if self._lines.calls_parallel(line):
            return True
        for op in self._ops_of[rank].get(line, ()):
            sites = self._sites((rank, op.number))
            inner = sites[: sites.index(line)]
            if (op.meeting is not None and not inner) or any(
                find_function(*each) not in self._lines.functions_of_one for each in inner
            ):
                return True
        return False

    def find_maker(self, cause: OperatorCause) -> Site | None:
        """Return the only line of ranks alone that makes a replaced value, if it makes it of right values.

        Collectives do not count, as one device runs none.
        """
        first, makers = cause.ops[0], dict[At, None]()
        for at in self._list_replaced(cause):
            last = self._joint.maker(skip_moves(self._joint, at))
            makers |= dict.fromkeys([*list_chain(self._joint, [at]), last])
        lines = {line for block in self._list_possible(first, cause.targets[0]) for line in block}
        alone = [op for op in makers if op[0] == first[0] and set(self._sites(op)[:1]) & lines]
        if len({self._sites(op)[0] for op in alone}) != 1 or any(map(self._is_doubtful, alone)):
            return None
        return find_line(*self._sites(alone[0])[0])

    def _is_doubtful(self, op: At) -> bool:
        """Return whether an operator is a collective or takes values that are not those of one device."""
        taken = self._joint.own_reads(op)
        return self._joint.op(op).meeting is not None or not all(map(self._agreement.agrees, taken))

    def _list_replaced(self, cause: OperatorCause) -> list[At]:
        """Return the operands that a repair replaces: also right ones, such as a whole value in a sum of parts."""
        first, found = cause.ops[0], [at for each in cause.repairs for at in each.changes.values]
        if any(each.kind == "share" for each in cause.repairs):
            known = [(at, self._alignment.find(at)) for at in self._joint.own_reads(first)]
            found += [at for at, each in known if each is not None and not each.over]
        return found

    def _list_possible(self, first: At, target: Target) -> list[_Block]:
        """Return the blocks of the step that compute no right result.

        All blocks, if nothing wrote the wrong result in the step: a branch may have left it out.
        """
        step = self._joint.op(first).step
        blocks = self._list_blocks(first[0], {step, target.mark[0]})
        proven = self._proven[first[0]]
        return [
            block
            for block in blocks
            if step < 0
            or not (
                any((target.mark[0], line) in proven for line in block)
                or self._makes_right(first, block)
                or self._is_confirmed(first, block)
            )
        ]

    def _makes_right(self, first: At, block: _Block) -> bool:
        """Return whether a block runs a collective, and all of its results in the step before `first` are right."""
        ops = [op for op in self._list_ops(first[0], {self._joint.op(first).step}, block) if op <= first]
        made = [at for op in ops for at in self._joint.results(op) if self._alignment.tells(at)]
        is_met = any(self._joint.op(op).meeting is not None for op in ops)
        return is_met and bool(made) and all(map(self._alignment.is_right, made))

    def _is_confirmed(self, first: At, block: _Block) -> bool:
        """Return whether all that a block hands on was combined with other values into right ones before `first`."""
        inside = set(self._list_ops(first[0], {self._joint.op(first).step}, block))
        made = [at for op in inside if op < first for at in self._joint.results(op)]
        handed = [at for at in made if not inside.issuperset(self._joint.users.get(at, ()))]
        return bool(handed) and all(self._is_combined(at, first) for at in handed)

    def _is_combined(self, start: At, first: At) -> bool:
        """Return whether an operator before `first` makes a right value, element by element, of this one and another.

        Right elements of a wrong place do not become right there.
        """
        joint, waiting, seen = self._joint, [start], set[At]()
        while waiting and len(seen) < _MOST_USES:
            at = waiting.pop(0)
            seen.add(at)
            for user in joint.users.get(at, ()):
                results = [each for each in joint.results(user) if user[0] == first[0] and user < first]
                if not results or not all(
                    map(self._alignment.is_right, filter(self._alignment.tells, results))
                ):
                    continue
                others = [each for each in joint.own_reads(user) if each not in seen]
                shape = joint.value(results[0]).shape
                if self._alignment.tells(results[0]) and any(
                    joint.value(each).shape == shape and not joint.value(each).label for each in others
                ):
                    return True
                waiting += results
        return False

    def _only_communicates(self, rank: int, steps: Collection[int], block: _Block) -> bool:
        """Return whether a block runs collectives, or allocates their buffers, and else only passes on elements."""
        is_needed = False
        for line in block:
            ops = self._list_ops(rank, steps, (line,))
            sends_objects = any(map(self._is_of_bytes, ops))  # torch computes their sizes
            if not sends_objects and not all(map(self._passes, ops)):
                return False
            is_needed |= any(
                self._joint.op(op).meeting is not None or is_blank(self._joint.op(op)) for op in ops
            )
        return is_needed

    def _is_of_bytes(self, op: At) -> bool:
        """Return whether an operator is a collective of bytes, such as pickled objects."""
        values = [*self._joint.own_reads(op), *self._joint.results(op)]
        is_met = self._joint.op(op).meeting is not None
        return is_met and any(self._joint.value(at).dtype == "uint8" for at in values)

    def _list_ops(self, rank: int, steps: Collection[int], block: _Block) -> list[At]:
        """Return the operators that the lines of a block call in some steps."""
        called = (op for line in block for op in self._ops_of[rank].get(line, ()))
        return [(rank, op.number) for op in called if op.step in steps]

    def _passes(self, op: At) -> bool:
        """Return whether an operator is a collective, moves elements or allocates memory."""
        recorded = self._joint.op(op)
        is_moved = any(self._alignment.is_moved(at, recorded) for at in self._joint.results(op))
        return recorded.meeting is not None or is_blank(recorded) or is_moved

    def _is_later(self, block: _Block, cause: OperatorCause) -> bool:
        """Return whether all lines of a block run for the first time after the wrong operators of the step."""
        first = cause.ops[0]
        starts = self._joint.programs[first[0]].starts.get(self._joint.op(first).step, {})
        if self._joint.op(first).step < 0:
            return False
        # Without a proof, any operator of the stretch may be the first wrong one.
        doubtful = () if cause.known or cause.repairs else cause.stretch
        last = max(number for rank, number in (first, *doubtful) if rank == first[0])
        return all(starts.get(line, 0) > last for line in block)

    def _list_writers(self, target: Target) -> list[Line]:
        """Return the lines of user code that call the operator which writes a result on one device."""
        shown = self._one.marks.get(target.mark, ())
        made = [self._one.op_of(each.value) for each in shown[-1:] if each.value is not None]
        return [(site.file, site.line) for op in made for site in op.sites if is_of_user(site.file)]

    def _may_be_wrong(self, at: At, lines: Collection[Line]) -> bool:
        """Return whether an operand is wrong, may be a right value of another place, or was made in these lines."""
        maker = self._joint.maker(at)
        return (
            is_passing(self._joint, maker)
            or not self._alignment.is_right(at)
            or self._agreement.is_displaced(at)
            or any(line in lines for line in self._sites(maker))
        )

    def _sites(self, op: At) -> list[Line]:
        """Return the lines of user code that call an operator or its forward operator, the innermost first."""
        program, recorded = self._joint.programs[op[0]], self._joint.op(op)
        forward = program.ops[recorded.origin].sites if recorded.origin >= 0 else ()
        sites = (*recorded.sites, *forward)
        return [(site.file, site.line) for site in sites if is_of_user(site.file)]

    def mark(self, origin: Origin) -> Origin:
        """Return an origin that says whether its line is in a branch of ranks alone."""
        is_branch = self._lines.place_of(origin.line) in self._lines_of_blocks
        return origin.model_copy(update={"is_branch": is_branch})

    @cached_property
    def _lines_of_blocks(self) -> set[Line]:
        programs = enumerate(self._joint.programs)
        blocks = [block for rank, program in programs for block in self._list_blocks(rank, program.lines)]
        return set(itertools.chain.from_iterable(blocks))

    def _list_blocks(self, rank: int, steps: Collection[int]) -> list[_Block]:
        """Return the blocks of lines of some steps that a rank executes, and one device does not.

        Left out are those that only communicate and those of functions that return groups, which one device does not
        run in a right program, either, and conditions that lead to no line.
        """
        lines = self._joint.programs[rank].lines
        known = self._lines.functions_of_one - self._lines.functions_of_groups
        executed = set[Line]().union(*(lines.get(step, set()) for step in steps))
        executed -= list_idle(executed - self._lines.of_one)
        found: list[_Block] = []
        last: _Function | None = None
        for line in sorted(executed):
            function = find_function(*line)
            is_new = line not in self._lines.of_one and function in known
            if is_new and last == function:
                found[-1] += (line,)
            elif is_new:
                found.append((line,))
            last = function if is_new else None
        return [block for block in found if not self._only_communicates(rank, steps, block)]

    @cached_property
    def _ops_of(self) -> list[dict[Line, list[Op]]]:
        """The operators that each line of user code calls, on each rank."""
        found: list[dict[Line, list[Op]]] = []
        for rank, program in enumerate(self._joint.programs):
            found.append({})
            for op in program.ops:
                for line in self._sites((rank, op.number)):
                    found[-1].setdefault(line, []).append(op)
        return found

    @cached_property
    def _proven(self) -> list[set[tuple[int, Line]]]:
        """The lines of each rank that compute right results, such as gradients of other parameters, with the step.

        Buffers may be right although their operands are wrong, such as counts of choices.
        """
        ends = [at for each in self._right if each.mark[1] != Kind.BUFFER for at in each.values.values()]
        found: list[set[tuple[int, Line]]] = [set() for _ in self._joint.programs]
        for op in self._joint.list_before(ends) if ends else ():
            found[op[0]].update((self._joint.op(op).step, line) for line in self._sites(op))
        return found
