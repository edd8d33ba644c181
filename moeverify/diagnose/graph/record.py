"""Records the operators of a step as a graph: what each took, and sums of powers of what it made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moeverify.checks.narrower import name_dtype
from moeverify.collectives.trace import find_call
from moeverify.diagnose.operators import (
    OperatorWatch,
    has_own_operators,
    is_passed_by,
    is_view,
    list_tensors,
    pair_arguments,
)
from moeverify.layout.placement import is_partial, local_part
from moeverify.train.module_taps import End

_COLLECTIVES = "c10d"
"""The namespace of collectives that write into tensors; those which return one are operators like others."""

_FUNCTIONAL = "_c10d_functional"

CAST = "_to_copy"
_SAME = frozenset(
    {"clone", "detach", "alias", "lift_fresh", "_unsafe_view", "wait_tensor", "_wrap_tensor_autograd", CAST}
)
"""Operators whose result has the elements of what they take; a cast has, unless it rounds."""

OVER_DIMS = frozenset(
    {
        "_softmax",
        "_log_softmax",
        "sum",
        "mean",
        "amax",
        "amin",
        "cumsum",
        "cumprod",
        "logsumexp",
        "var",
        "std",
    }
)
"""Operators whose integers are dims, which are counted from the last one here."""

_WRITES = frozenset({"copy_", "zero_", "fill_"})
"""Operators that write over what they are given first."""

MOVES_ROWS = frozenset({"index_select", "gather", "index", "flip", "roll"})
"""Operators that give out elements of what they take, as indices say."""

_ROUNDING = 1e-13
"""By how much of their size two sums of the same numbers in float64 may differ, which are in another order."""

_FROM_PYTHON = "lift_fresh"

CONSTANT = "tensor"
"""What stands for an operator where numbers of Python were made a tensor."""

WRITE = "write"
"""What stands for an operator where a part of a tensor was written, or other values, unseen."""

_OF_OPTIMIZERS = ("_foreach_", "_fused_")

_ENGINE = "_engine_run_backward"
"""The function of torch in which autograd runs."""

_LARGE = 1e100
"""What is larger hides a score from a softmax, and its third power is no number."""

_MOST_NODES = 40_000
_MOST_ELEMENTS = 1 << 31


@dataclass(frozen=True)
class Moments:
    """How many elements a tensor has, how many of these are no numbers or huge, and sums of powers of the others.

    These are sums over all elements in any order: those of the shards of ranks add up to those of the whole tensor.
    """

    count: int
    hidden: int
    first: float
    second: float
    third: float
    first_size: float
    third_size: float

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the elements of both."""
        return Moments(
            self.count + other.count,
            self.hidden + other.hidden,
            self.first + other.first,
            self.second + other.second,
            self.third + other.third,
            self.first_size + other.first_size,
            self.third_size + other.third_size,
        )


NOTHING = Moments(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


def is_alike(found: Moments, right: Moments, scale: float, bound: float) -> bool:
    """Return whether two tensors have the same elements, one of them so many times, and the first `scale` times."""
    if found.hidden * right.count != right.hidden * found.count:
        return False
    ratio, large = found.count / right.count, abs(scale)
    powers = (
        (found.first, scale * right.first, large * right.first_size, 1),
        (found.second, large**2 * right.second, large**2 * right.second, 2),
        (found.third, scale**3 * right.third, large**3 * right.third_size, 3),
        (found.first_size, large * right.first_size, large * right.first_size, 1),
    )
    return all(abs(one - two * ratio) <= bound * power * size * ratio for one, two, size, power in powers)


@dataclass(frozen=True)
class Node:
    """A tensor that an operator made, or, without an `operator`, one that was there before.

    `args` are the numbers of the nodes of what it took, `options` its other arguments. `output` says which of several
    results it is. `is_same` is true where it has the very elements of its first argument. `site` is the file and line
    of the call, where the operator was called from Python. `name` is that of a parameter or buffer. `is_index` is
    true of whole numbers, which may be places in another tensor; `is_backward` of what autograd has made.
    """

    operator: str
    args: tuple[int, ...]
    options: tuple[Any, ...]
    moments: Moments
    output: int = 0
    is_same: bool = False
    site: str = ""
    name: str = ""
    is_index: bool = False
    is_backward: bool = False


@dataclass(frozen=True)
class Graph:
    """The nodes of a step, and those at the ends of modules. Gradients are those of `scale` times the loss.

    `totals` are sums over all tokens, of which a rank or micro-batch may have a part: losses, and gradients of
    parameters.
    """

    nodes: list[Node] = field(default_factory=list)
    ends: dict[End, int] = field(default_factory=dict)
    totals: dict[End, int] = field(default_factory=dict)
    scale: float = 1.0


class GraphMode(OperatorWatch):
    """Records into `graph` every operator that is called while `is_open` says so; too long a step is forgotten.

    `names` are those of parameters and buffers by where they are in memory.

    Tensors are known by their memory: a view, a detached tensor and what autograd has saved are the same tensor.
    Subclasses of tensors are seen as what they are made of.
    """

    def __init__(
        self, names: Mapping[int, str], scale: float = 1.0, is_open: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph(scale=scale)
        self._is_open = is_open
        self._names = names
        self._room = _MOST_ELEMENTS
        self._exact: dict[tuple[Any, ...], int] = {}
        self._loose: dict[tuple[int, int], int] = {}
        self._versions: dict[tuple[Any, ...], int] = {}
        self._written: dict[int, int] = {}
        self._pending: dict[int, tuple[str, tuple[int, ...]]] = {}

    def note_end(self, end: End, tensor: Tensor) -> None:
        """Keep which node a tensor at an end of a module is."""
        with _disable_current_modes():
            local = local_part(tensor)
            if not is_partial(tensor) and self._can_go_on() and local.numel():
                self.graph.ends.setdefault(end, self._find(local))

    def note_total(self, end: End, tensor: Tensor) -> None:
        """Keep which node a sum over tokens is, or a rank's part of it."""
        with _disable_current_modes():
            local = local_part(tensor)
            if self._can_go_on() and local.numel():
                self.graph.totals.setdefault(end, self._find(local))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if is_passed_by(func, types):
            return func(*args, **named)
        if any(map(has_own_operators, types)):
            return NotImplemented
        if not (self._is_open() and self._can_go_on()):
            return func(*args, **named)
        operator = func.overloadpacket.__name__
        if operator.startswith(_OF_OPTIMIZERS):
            return func(*args, **named)
        values = [*args, *named.values()]
        tensors = list(list_tensors(values))
        if operator == _FROM_PYTHON:
            for each in tensors:
                self._write(each, Node(CONSTANT, (), (), self._measure(each), site=_find_site()))
        taken = [self._find(each) for each in tensors]
        result = func(*args, **named)
        if func.namespace.startswith(_FUNCTIONAL):
            with _disable_current_modes():  # what it returns is not there yet
                for each in list_tensors(result):
                    torch.ops._c10d_functional.wait_tensor(each)
        if func.namespace == _COLLECTIVES:
            self._note_collective(operator, [list(list_tensors(each)) for each in values])
            return result
        kept = taken[1:] if operator in _WRITES else taken
        made = Node(
            operator, tuple(kept), _make_options(operator, values, result), NOTHING, site=_find_site()
        )
        if is_view(func) and tensors:
            # A view gets the version of what it shows only when autograd has seen it.
            self._keep(made, list_tensors(result), _version_of(tensors[0]), is_view=True)
        else:
            self._keep(made, [*list_tensors(result), *_list_written(func, args, named, result)], None)
        return result

    def _note_collective(self, operator: str, groups: Sequence[Sequence[Tensor]]) -> None:
        """Keep what a collective takes: what it writes is there when it is waited for, and looked at when it is used.

        Those that take other tensors than they write have the latter first.
        """
        filled = [group for group in groups if group]
        if filled:
            sources = tuple(map(self._find, filled[1 if len(filled) > 1 else 0]))
            self._pending |= {tensor.data_ptr(): (operator, sources) for tensor in filled[0]}

    def _can_go_on(self) -> bool:
        if self._room < 0 or len(self.graph.nodes) > _MOST_NODES:
            self.graph.nodes.clear()
            self.graph.ends.clear()
            self.graph.totals.clear()
            self._room = -1
            return False
        return True

    def _keep(
        self, made: Node, tensors: Iterable[Tensor], version: int | None, *, is_view: bool = False
    ) -> None:
        source = self.graph.nodes[made.args[0]].moments if made.args else NOTHING
        for number, tensor in enumerate(tensors):
            is_same = (is_view or made.operator in _SAME) and source.count == tensor.numel()
            moments = source if is_same and made.operator != CAST else self._measure(tensor)
            is_same = (is_same and moments == source) or self._is_permuted(made, moments, source)
            node = replace(made, moments=moments, output=number, is_same=is_same)
            if is_view:
                self._add(tensor, node, version)
            else:
                self._write(tensor, node)

    @staticmethod
    def _is_permuted(made: Node, moments: Moments, source: Moments) -> bool:
        """Return whether an operator puts the very elements that it takes in another order, as far as sums tell."""
        is_moved = made.operator in MOVES_ROWS and moments.count == source.count
        return is_moved and is_alike(moments, source, 1.0, _ROUNDING)

    def _write(self, tensor: Tensor, node: Node) -> int:
        """Keep a node whose values are new in its memory."""
        number = self._written[tensor.data_ptr()] = self._add(tensor, node)
        return number

    def _add(self, tensor: Tensor, node: Node, version: int | None = None) -> int:
        number = len(self.graph.nodes)
        is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        is_backward = torch._C._current_graph_task_id() >= 0
        self.graph.nodes.append(replace(node, is_index=is_index, is_backward=is_backward))
        key = _key_of(tensor)
        self._exact[key] = self._loose[key[0], tensor.numel()] = number
        self._versions[key] = _version_of(tensor) if version is None else version
        return number

    def _find(self, tensor: Tensor) -> int:
        """Return the node of a tensor, which is a new one where nothing recorded has made its values."""
        key = _key_of(tensor)
        pending = self._pending.pop(key[0], None)
        if pending is not None:
            return self._write(tensor, Node(pending[0], pending[1], (), self._measure(tensor)))
        number = self._exact.get(key, self._loose.get((key[0], tensor.numel())))
        if number is None:
            return self._add(
                tensor, Node("", (), (), self._measure(tensor), name=self._names.get(key[0], ""))
            )
        known, written = self.graph.nodes[number], self._written.get(key[0], -1)
        if written > number:
            # Other values were written into the memory since, as gathered parameters are; or into a part of it.
            if self.graph.nodes[written].moments.count == tensor.numel():
                return written
            return self._add(tensor, Node(WRITE, (number, written), (), self._measure(tensor)))
        if self._versions.get(key, _version_of(tensor)) == _version_of(tensor):
            return number
        # Something was written into a part of it, through a view; a weight is still that weight.
        moments = self._measure(tensor)
        is_leaf = not known.operator
        other = Node("", (), (), moments, name=known.name) if is_leaf else Node(WRITE, (number,), (), moments)
        return self._add(tensor, other)

    def _measure(self, tensor: Tensor) -> Moments:
        self._room -= tensor.numel()
        return measure(tensor)


def measure(tensor: Tensor) -> Moments:
    """Return the moments of a tensor, of any dtype and shape, in float64."""
    with _disable_current_modes():
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        wide = values.to(torch.float64).reshape(-1)
        hidden = 0
        # NaN is not less than anything.
        if not bool(wide.abs().amax() < _LARGE):
            is_seen = wide.abs() < _LARGE
            hidden = len(wide) - int(is_seen.sum())
            wide = torch.where(is_seen, wide, 0.0)
        squares, sizes = wide * wide, wide.abs()
        sums = (wide.sum(), squares.sum(), squares.dot(wide), sizes.sum(), squares.dot(sizes))
        return Moments(len(wide), hidden, *torch.stack(sums).tolist())


def _find_site() -> str:
    """Return where an operator is called from; nothing for what autograd calls itself."""
    frame = find_call((__file__,))
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        if inner.f_code.co_name == _ENGINE:
            return ""
        inner = inner.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _key_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _list_written(func: Any, args: Any, named: Mapping[str, Any], result: Any) -> Iterator[Tensor]:
    """Yield what an operator writes into besides its results, as gathered parameters are."""
    returned = {id(each) for each in list_tensors(result)}
    for argument, value in pair_arguments(func, args, named):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (each for each in list_tensors(value) if id(each) not in returned)


def _make_options(operator: str, values: Sequence[Any], result: Any) -> tuple[Any, ...]:
    """Return the numbers and words among arguments, with dims counted from the last one."""
    options = tuple(_list_options(values))
    if operator == CAST:
        return (name_dtype(result.dtype),)
    if operator in OVER_DIMS and isinstance(values[0], Tensor):
        num_dims = values[0].ndim
        return tuple(each - num_dims if type(each) is int and each >= 0 else each for each in options)
    return options


def _list_options(value: Any) -> Iterator[Any]:
    """Yield the numbers and words among arguments."""
    if isinstance(value, bool | int | float | str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _list_options(each)
