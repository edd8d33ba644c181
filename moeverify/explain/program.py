"""Operators of one process up to the end of a step, in static single assignment form.

Every tensor is a `Value` with a unique number. Operators take values and make new ones; a write to memory
makes a new value. So a program can be executed again with another operator or value at any place. Programs
are plain data: a rank pickles its program and sends it to rank 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.results.operator_table import Phase

LEAF = "leaf"
"""Pseudo-operator: a tensor that existed before recording began, such as a parameter."""

UNSEEN = "unseen"
"""Pseudo-operator: memory changed without a recorded operator."""

READ = "read"
"""Pseudo-operator: read of memory that several operators wrote parts of. Arguments: the parts, as written."""

HIDDEN = frozenset({LEAF, READ, UNSEEN})
"""Pseudo-operators, which no line of code calls."""

OVERWRITING = frozenset({"copy", "zero", "fill", "normal", "uniform", "all_gather_copy_in", "arange"})
"""Operators that overwrite a tensor argument without reading it.

Named outputs (`out=`) are overwritten too.
"""

BATCH = "batch "
"""Label prefix of a batch's tensors: tokens, targets and other inputs of a step."""

Mark = tuple[int, str, str]
"""(step, kind, name) of a tensor that the training loop shows, such as (0, "gradient", "embed.weight")."""

SETUP = -1
"""Step number of operators before the first step: the model is built, sharded and loaded."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a value in the arguments of an operator."""

    number: int


@dataclass(frozen=True, slots=True)
class GroupRef:
    """Process group of a collective. `ranks` are global ranks. `axis` names a mesh axis, if known."""

    name: str
    ranks: tuple[int, ...]
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Location of a tensor in its storage, in elements of its dtype."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> range:
        """Return the elements of the storage from the first to the last one of the tensor."""
        if 0 in self.shape:
            return range(self.offset, self.offset)
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return range(self.offset, self.offset + last + 1)


@dataclass(frozen=True, slots=True)
class Site:
    """A call in a line of source code.

    `offset` is the bytecode offset, which distinguishes calls on one line. `span` is the position of the
    expression: (first line, first column, last line, last column). Columns count bytes.
    """

    file: str
    line: int
    function: str
    offset: int = 0
    span: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Meeting:
    """Identity of one collective on all of its ranks.

    `sequence` counts the collectives of the group, or the messages from `source` to `target` in it.
    """

    group: GroupRef
    sequence: int
    source: int = -1
    target: int = -1


@dataclass(slots=True)
class Op:
    """One call of an operator.

    - `name`: `namespace.operator.overload`.
    - `args`, `kwargs`: the arguments, with `Ref`s for tensors.
    - `results`: the values that it returned, then the values that it wrote.
    - `written`: the arguments that it wrote to, by position or name.
    - `sites`: lines of user code, the innermost first.
    - `origin`: for a backward operator, the forward operator that it differentiates; -1 for others.
    - `step`: the training step, or `SETUP`.
    - `scalar`: the Python number that it returned, if any.
    """

    number: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...] = ()
    written: tuple[int | str, ...] = ()
    sites: tuple[Site, ...] = ()
    module: str = ""
    phase: Phase = "forward"
    step: int = SETUP
    origin: int = -1
    meeting: Meeting | None = None
    scalar: Any = None

    @property
    def short(self) -> str:
        """The name of the operator without namespace and overload."""
        parts = self.name.split(".")
        name = parts[1] if len(parts) > 1 else self.name
        return name.removeprefix("_foreach_")

    def refs(self) -> Iterator[int]:
        """Yield the numbers of the values among the arguments."""
        yield from list_refs(self.args)
        yield from list_refs(tuple(self.kwargs.values()))

    def reads(self) -> Iterator[int]:
        """Yield the numbers of the values that the result depends on.

        Values that are only overwritten are left out.
        """
        overwritten = self.overwritten
        for place, each in enumerate(self.args):
            if place not in overwritten:
                yield from list_refs(each)
        for name, each in self.kwargs.items():
            if name not in overwritten:
                yield from list_refs(each)

    @property
    def overwritten(self) -> tuple[int | str, ...]:
        """The places of arguments that are written without being read."""
        if self.short.strip("_") in OVERWRITING:
            return self.written
        return tuple(place for place in self.written if isinstance(place, str))


@dataclass(slots=True)
class Value:
    """One tensor.

    `op` is the number of the operator that made it. `label` names parameters, buffers and inputs. `data` is
    a copy on the CPU, or None if the program was too large to keep it. `alias` is the number of the value
    that this is a view of, or -1. `place` is its storage and its location there, if it was recorded.
    """

    number: int
    op: int
    shape: tuple[int, ...]
    dtype: str
    data: Tensor | None = None
    label: str = ""
    alias: int = -1
    place: tuple[int, Geometry] | None = None

    @property
    def is_floating(self) -> bool:
        """Whether the dtype is a floating-point one."""
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(slots=True)
class Shown:
    """A value that the training loop showed, with its region of the logical tensor.

    `value` is None if the rank has no tensor.
    """

    value: int | None
    region: Region


@dataclass(frozen=True, slots=True)
class End:
    """A tensor at the end of a module: its output, or the gradient of its output.

    `slot` is the index among several tensors; `count` counts the module's calls in a step.
    """

    step: int
    module: str
    is_gradient: bool
    slot: int
    count: int
    value: int


@dataclass(slots=True)
class Race:
    """Use of memory by the operator `other` while the collective `op` might still be using it.

    `is_direct`: code outside torch started the collective, and so must wait for it.
    """

    op: int
    other: int
    kind: str
    is_direct: bool = True


@dataclass(slots=True)
class Executed:
    """User code that one process executed.

    - `lines`: the (file, line) that were executed, by step.
    - `names`: the values that user code assigned, as `python_values.encode` returns them, by step and `Name`.
    - `skipped`: (file, first line, last line) of the functions of which only the first lines were followed.
    """

    lines: dict[int, set[tuple[str, int]]] = field(default_factory=dict)
    names: dict[int, dict[tuple[str, int, str], list[Any]]] = field(default_factory=dict)
    skipped: set[tuple[str, int, int]] = field(default_factory=set)

    def note_line(self, step: int, line: tuple[str, int]) -> None:
        """Note that a (file, line) is executed for the first time in a step."""
        self.lines[step].add(line)

    def list_lines(self) -> set[tuple[str, int]]:
        """Return the lines of all steps."""
        return set().union(*self.lines.values())

    def list_skipped(self) -> set[tuple[str, int]]:
        """Return the lines of the functions of which only the first lines were followed."""
        return {(file, line) for file, first, last in self.skipped for line in range(first, last + 1)}


@dataclass(slots=True)
class Program(Executed):
    """Recorded operators and values of one process, and the user code that it executed.

    - `marks`: the tensors that the training loop showed, one for each part that the rank holds.
    - `ends`: the tensors at the ends of modules.
    - `races`: uses of memory that a collective might still be using.
    - `shares`: (rows, positions) of the batch, for each micro-batch.
    - `cuts`: (next operator, value, lines of the call) of each tensor with a gradient that a `detach` or a
      collective takes, whose result passes none.
    - `groups`: the calls that took each process group from a mesh or made it, by the group's name.
    - `optimizers`: the calls that gave parameters to an optimizer.
    - `starts`: the number of operators before each (file, line) ran for the first time, by step.
    - `is_complete`: False if the program was too large to keep all values.
    """

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    marks: dict[Mark, list[Shown]] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    shares: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)
    cuts: list[tuple[int, int, tuple[Site, ...]]] = field(default_factory=list)
    groups: dict[str, list[tuple[Site, ...]]] = field(default_factory=dict)
    optimizers: list[tuple[Site, ...]] = field(default_factory=list)
    starts: dict[int, dict[tuple[str, int], int]] = field(default_factory=dict)
    is_complete: bool = True

    def note_line(self, step: int, line: tuple[str, int]) -> None:
        """Note that a (file, line) is executed for the first time in a step, before the next operator."""
        self.lines[step].add(line)
        self.starts.setdefault(step, {})[line] = len(self.ops)

    def list_shown(self) -> set[int | None]:
        """Return the values that the training loop shows."""
        return {each.value for parts in self.marks.values() for each in parts}

    def note_cuts(self, values: Iterable[int], sites: tuple[Site, ...]) -> None:
        """Note values with a gradient that the next operator takes, whose result passes none."""
        self.cuts += [(len(self.ops), value, sites) for value in values]

    def sites_of(self, op: Op) -> tuple[Site, ...]:
        """Return the lines of an operator, or for a derivative the lines of its forward operator.

        An operator in `backward` of an autograd function has its lines there, then those that call the function.
        """
        if op.origin < 0:
            return op.sites
        forward = self.ops[op.origin].sites
        last = next((at for at, site in enumerate(op.sites) if site.function == "backward"), None)
        if not op.sites or last is None:
            return op.sites or forward
        inside = [at for at, site in enumerate(forward) if site.function == "forward"]
        first = next((at for at in inside if forward[at].file == op.sites[last].file), None)
        return op.sites if first is None else (*op.sites[: last + 1], *forward[first + 1 :])

    def base(self, value: int) -> Value:
        """Return the value that a value is a view of, or the value itself."""
        found = self.values[value]
        while found.alias >= 0:
            found = self.values[found.alias]
        return found

    def op_of(self, value: int) -> Op:
        """Return the operator that made a value."""
        return self.ops[self.values[value].op]


def group_lines(executed: Iterable[Executed]) -> dict[str, set[int]]:
    """Return the lines that any of the processes executed, by file."""
    found = defaultdict[str, set[int]](set)
    for each in executed:
        for file, line in each.list_lines():
            found[file].add(line)
    return found


def list_refs(arguments: Any) -> Iterator[int]:
    """Yield the numbers of the values in arguments, including nested lists."""
    if isinstance(arguments, Ref):
        yield arguments.number
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from list_refs(each)


def map_refs(arguments: Any, replace: Any) -> Any:
    """Return arguments with every `Ref` replaced by `replace(number)`."""
    if isinstance(arguments, Ref):
        return replace(arguments.number)
    if isinstance(arguments, tuple):
        return tuple(map_refs(each, replace) for each in arguments)
    if isinstance(arguments, list):
        return [map_refs(each, replace) for each in arguments]
    return arguments


def list_numbers(arguments: Sequence[Any]) -> list[Any]:
    """Return the Python numbers in arguments, in order."""
    found: list[Any] = []
    for each in arguments:
        if isinstance(each, list | tuple):
            found += list_numbers(each)
        elif isinstance(each, int | float) and not isinstance(each, bool):
            found.append(each)
    return found
