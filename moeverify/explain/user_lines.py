"""Lines of user code around recorded operators: call stacks, lines that ranks alone execute, and definitions."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from moeverify.explain.definitions import Definitions
from moeverify.explain.describe import make_line, shorten
from moeverify.explain.joint import At, Joint
from moeverify.explain.left_out import LeftOut, list_left_out
from moeverify.explain.owned import list_choosing
from moeverify.explain.program import HIDDEN, SETUP, Program, Site, group_lines
from moeverify.explain.python_values import Difference, PythonValues
from moeverify.explain.sites import find_line, is_of_hook, is_of_user
from moeverify.explain.syntax import RETURNED, find_function, map_backward
from moeverify.results.culprit import CodeLine, Origin, OriginKind

_COLLECTIVE = frozenset({"collective", "missing", "repeated", "unused"})
"""Relations of collectives to a wrong result."""
_OF_PARALLEL = re.compile(
    r"\.(wait|no_sync|set_requires_gradient_sync|to_local|full_tensor)\(|\bbarrier\(|\.(device_mesh|placements)\b"
)
"""Calls and attributes of torch that only parallel code has, and that run no operator."""
_OF_FSDP = re.compile(
    r"\b(fully_shard|FSDP|FullyShardedDataParallel|set_(gradient|reduce_scatter)_divide_factor"
    r"|set_requires_\w+|set_force_sum_reduction_for_comms)\("
)
"""Calls that tell FSDP which parameters to shard, and how to reduce their gradients."""
_MOST_CALLS = 3
"""Maximum number of calls around a line that are shown."""


class UserLines:
    """Lines of the user's code in the programs of the ranks (`joint`) and of one device (`one`)."""

    def __init__(self, joint: Joint, one: Program) -> None:
        self._joint, self._one = joint, one

    def sites(self, op: At) -> tuple[Site, ...]:
        """Return the lines of the user's code that call an operator, the innermost first."""
        return tuple(site for site in self._joint.sites(op) if is_of_user(site.file))

    def stack(self, op: At) -> tuple[Site, ...]:
        """Return the lines of user code that call an operator, and those of its forward operator in other files."""
        recorded, own = self._joint.op(op), self.sites(op)
        if recorded.origin < 0 or not own:
            return own
        sites = self._joint.programs[op[0]].ops[recorded.origin].sites
        return own[:1] + tuple(each for each in sites if is_of_user(each.file) and each.file != own[0].file)

    @cached_property
    def makers(self) -> dict[tuple[int, str], At]:
        """The operator that made each named tensor before the first step, by rank and name."""
        return {
            (rank, value.label): (rank, value.op)
            for rank, program in enumerate(self._joint.programs)
            for value in program.values
            if value.label and program.ops[value.op].step < 0
        }

    def list_choosing(self, op: At) -> Iterator[Origin]:
        """Yield the lines that compute the masks and indices of an operator, the nearest first."""
        chosen = map(self.sites, list_choosing(self._joint, op))
        yield from (make_origin("chosen", sites) for sites in chosen if sites)

    def list_aliases(self, rank: int, name: str) -> Iterator[Origin]:
        """Yield the lines of ranks alone that take the memory of a tensor before the first step, the last first."""
        program = self._joint.programs[rank]
        marks = (mark for mark in program.marks if mark[0] == SETUP and mark[2] == name)
        bases = {each.value for mark in marks for each in program.marks[mark] if each.value is not None}
        first = next((op.number for op in program.ops if op.step >= 0), len(program.ops))
        taken = [(op.number, value, op.sites) for op in program.ops[:first] for value in op.reads()]
        taken += [cut for cut in program.cuts if cut[0] <= first]
        for _, value, sites in sorted(taken, key=lambda each: -each[0]):
            own = [site for site in sites if is_of_user(site.file)]
            if own and program.base(value).number in bases and self.is_parallel(own[0]):
                yield make_origin("made", own)

    def find_maker(self, op: At) -> At:
        """Return the operator of user code that made a tensor before the first step, of which this may take a view.

        A view of all elements, such as `to_local()`, says nothing about them. Other views choose a part.
        """
        program, makers = self._joint.programs[op[0]], [op]
        for value in (program.values[number] for number in self._joint.op(op).results[:1]):
            base = program.base(value.number)
            is_whole = math.prod(value.shape) == math.prod(base.shape)
            makers.insert(0 if is_whole else 1, (op[0], base.op))
        return next(filter(self.sites, makers), op)

    def made_at(self, op: At) -> tuple[Site, ...]:
        """Return the lines of the operator that made a tensor before the first step."""
        return self.sites(self.find_maker(op))

    def list_backward(self, op: At) -> list[Site]:
        """Return the executed `return` lines of `backward`, for an operator in `forward` of an autograd function."""
        executed = self._joint.programs[op[0]].lines.get(self._joint.op(op).step, ())
        for site in self.sites(op):
            if returns := map_backward(site.file).get(site.line):
                lines = (next((at for at in each if (site.file, at) in executed), 0) for each in returns)
                return [find_line(site.file, line) for line in lines if line]
        return []

    def is_parallel(self, site: Site) -> bool:
        """Return whether ranks execute a line and one device does not."""
        return (site.file, site.line) in self._of_ranks

    def is_run(self, site: Site, name: str) -> bool:
        """Return whether one device runs an operator with this name on a line."""
        return (site.file, site.line, name) in self._ops_of_one

    def place_of(self, line: CodeLine) -> tuple[str, int]:
        """Return the (file, line) of a line, whose file is shortened."""
        return self._files.get(line.file, line.file), line.line

    def is_branch(self, line: tuple[str, int]) -> bool:
        """Return whether ranks alone execute a line, in a function that one device executes, too."""
        return line in self._of_ranks and find_function(*line) in self.functions_of_one

    def define(
        self,
        sites: tuple[Site, ...],
        *,
        is_of_tensors: bool = False,
        of_conditions: bool = False,
        words: Collection[str] = (),
        keyword: str = "",
        has_objects: bool = False,
    ) -> Iterator[Origin]:
        """Yield definitions of the arguments of a call, with `has_objects` also those of modules and meshes.

        First come those with these words, then those with other values on one device, then those of ranks alone.

        With `keyword`, yield only definitions of this argument, if the call has it.
        """
        found = self._definitions.find(
            sites,
            is_of_tensors=is_of_tensors,
            of_conditions=of_conditions,
            keyword=keyword,
            has_objects=has_objects,
        )
        yield from (make_origin("definition", [site], found[site]) for site in self._sort(found, words))

    def list_members(self, sites: tuple[Site, ...], words: Collection[str]) -> Iterator[Origin]:
        """Yield the lines that decide which elements the lists have that the calls of a stack take.

        Those with these words come first, then those of ranks alone.
        """
        found = dict.fromkeys(self._definitions.find_members(sites))
        yield from (make_origin("member", [site]) for site in self._sort(found, words))

    def list_conditions(self, sites: tuple[Site, ...]) -> Iterator[Origin]:
        """Yield the conditions under which two calls of a stack run, those of the outer one first."""
        yield from (make_origin("condition", [site]) for site in self._definitions.find_conditions(sites))

    def list_deciding(self, sites: tuple[Site, ...]) -> Iterator[Origin]:
        """Yield the conditions under which calls of a stack run, then those of the elements of their lists."""
        yield from self.list_conditions(sites)
        yield from self.list_members(sites, ())

    def calls_parallel(self, line: tuple[str, int]) -> bool:
        """Return whether a line makes a call of parallel code, or calls functions that ranks alone execute."""
        if _OF_PARALLEL.search(linecache.getline(*line)):
            return True
        called = self._definitions.list_called(*line, is_direct=True) & self._functions_of_ranks
        return bool(called) and called.isdisjoint(self.functions_of_one)

    def list_configuring(self, op: At) -> Iterator[Origin]:
        """Yield the calls of ranks that configure FSDP, if it runs an operator; first those that name its module."""
        program, recorded = self._joint.programs[op[0]], self._joint.op(op)
        if not is_of_hook(self._joint.sites(op)):
            return
        lines = sorted(line for line in program.list_lines() if is_of_user(line[0]))
        found = [find_line(*line) for line in lines if _OF_FSDP.search(linecache.getline(*line))]
        for site in self._sort(dict.fromkeys(found), recorded.module.split(".")[-1:]):
            yield make_origin("configures", [site])

    def list_options(self, rank: int) -> Iterator[Origin]:
        """Yield the lines that define the parameters and options of the user's optimizers."""
        for sites in self._joint.programs[rank].optimizers:
            yield from self.define(tuple(site for site in sites if is_of_user(site.file)))

    def _sort(self, sites: Mapping[Site, Difference | None], words: Collection[str]) -> list[Site]:
        """Sort lines: first those with these words, then those with differences, then those of ranks alone."""

        def rank_of(site: Site) -> tuple[bool, bool, bool]:
            text = linecache.getline(site.file, site.line)
            is_named = any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)
            is_equal = sites[site] is None
            return not is_named, is_equal, is_equal and not self.is_parallel(site)

        return sorted(sites, key=rank_of)

    @cached_property
    def of_one(self) -> set[tuple[str, int]]:
        """The lines of user code that one device executes."""
        return self._one.list_lines()

    @cached_property
    def _files(self) -> dict[str, str]:
        return {shorten(file): file for file in group_lines(self._joint.programs)}

    @cached_property
    def left_out(self) -> list[LeftOut]:
        """The arms of conditions and loops that one device executes, and no rank."""
        followed = self.of_one - set().union(*(program.list_skipped() for program in self._joint.programs))
        return list(list_left_out(followed, self._of_any_rank))

    @cached_property
    def _ops_of_one(self) -> set[tuple[str, int, str]]:
        return {(site.file, site.line, op.name) for op in self._one.ops for site in op.sites[:1]}

    @cached_property
    def _functions_of_ranks(self) -> set[tuple[str, int]]:
        return {find_function(*line) for line in self._of_any_rank}

    @cached_property
    def functions_of_one(self) -> set[tuple[str, int]]:
        """The functions of which one device executes a line, each as (file, first line of its body)."""
        return {found for line in self.of_one if (found := find_function(*line))[1] > 0}

    @cached_property
    def functions_of_groups(self) -> set[tuple[str, int]]:
        """The functions that return process groups or meshes. A right layout executes lines of them, too."""
        names = self._values.list_groups()
        return {find_function(file, line) for file, line, name in names if name == RETURNED}

    @cached_property
    def _of_any_rank(self) -> set[tuple[str, int]]:
        return set().union(*(program.list_lines() for program in self._joint.programs))

    @cached_property
    def _of_ranks(self) -> set[tuple[str, int]]:
        return self._of_any_rank - self.of_one

    @cached_property
    def _definitions(self) -> Definitions:
        return _make_definitions(self._joint.programs, self._values)

    @cached_property
    def _values(self) -> PythonValues:
        ranks = [program.names for program in self._joint.programs]
        return PythonValues(self._one.names, ranks, self._one.list_lines())


def keep_different(definitions: Iterable[Origin]) -> Iterator[Origin]:
    """Yield the definitions of values that one device does not have."""
    return (each for each in definitions if each.here is not None)


def make_origin(kind: OriginKind, sites: Sequence[Site], difference: Difference | None = None) -> Origin:
    """Return the record of a line, `sites[0]`, and of the next line of the user's code that calls it.

    Functions around collectives are shared by layers and gradients, so these have more calls.
    """
    callers = [site for site in sites[1:] if is_of_user(site.file)][:_MOST_CALLS]
    return Origin(
        kind=kind,
        line=make_line(sites[0]),
        caller=make_line(callers[0]) if callers else None,
        outer=tuple(map(make_line, callers[1:])) if kind in _COLLECTIVE else (),
        here=None if difference is None else difference.here,
        there=None if difference is None else difference.there,
    )


def _make_definitions(programs: Sequence[Program], values: PythonValues) -> Definitions:
    """Return the definitions in the user's files that the recorded programs of the ranks name."""
    files: set[str] = set()
    made: set[tuple[str, int]] = set()
    read: set[tuple[str, int]] = set()
    for program in programs:
        for op in program.ops:
            users = [site for site in op.sites if is_of_user(site.file)]
            files.update(site.file for site in users)
            if users and op.short not in HIDDEN:
                (made if op.scalar is None else read).add((users[0].file, users[0].line))
            if op.step >= 0 and any(program.values[number].is_floating for number in op.results):
                made.update((site.file, site.line) for site in users)
        calls = [each[0] for each in program.groups.values()] + program.optimizers
        files.update(site.file for sites in calls for site in sites)
    # A line that makes tensors is in the recorded program, if it does not read a number of one.
    return Definitions(
        filter(is_of_user, files),
        lambda *line: line in made and line not in read,
        group_lines(programs),
        values,
    )
