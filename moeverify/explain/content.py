"""Elements of the single device's tensors, found by their values.

Every element that a single-device operator computes has an identity: an integer from 1 on. Operators that
only move elements, such as `cat` or `index`, pass identities on. A tensor of a rank is described by the
identities of its elements, whatever its shape, order or padding. Identity 0 means padding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeverify.explain.compare import is_rounding
from moeverify.explain.cuts import fit_region
from moeverify.explain.operators import NotExecutable, is_blank, run
from moeverify.explain.program import READ, Op, Program

TOLERANCE = 1e-9
"""Maximum distance of equal elements, relative to themselves and to the root mean square of their tensor."""

_NUM_SAMPLES = 16
_NUM_LOOKED_AT = 96
_NUM_FIRST = 4
_DIVISORS = torch.arange(1, 129, dtype=torch.float64)
_LARGE = 1e6
"""Integers beyond this are not treated as simple numbers, such as counts."""

_MOST_QUOTIENTS = 65536
_MOST_OF_VALUE = 256
"""Maximum number of quotients of a value that are looked up."""

_MOST_HITS = 64
"""An element that occurs in more tensors than this does not identify a tensor."""

_MOST_ROOTS = 4
"""Maximum number of tensors that one tensor may be composed of, such as two fused projections."""

MOVES = frozenset(
    {
        "_to_copy",
        "all_gather_copy_in",
        "cat",
        "chunk_cat",
        "clone",
        "constant_pad_nd",
        "contiguous",
        "copy",
        "embedding",
        "flip",
        "gather",
        "index",
        "index_copy",
        "index_put",
        "index_select",
        "masked_scatter",
        "masked_select",
        "repeat",
        "roll",
        "scatter",
        "select_scatter",
        "slice_scatter",
        "split_with_sizes_copy",
        "stack",
        "take",
        "to",
        "where",
        READ,
    }
)
"""Operators whose results consist of elements of their operands."""


def is_move(op: Op) -> bool:
    """Return whether an operator only moves elements."""
    if op.short.strip("_") in ("to", "to_copy"):
        dtypes = [each for each in (*op.args, *op.kwargs.values()) if isinstance(each, torch.dtype)]
        return all(dtype in (torch.float64, torch.float32) for dtype in dtypes)
    if op.name in ("aten.masked_fill.Scalar", "aten.masked_fill_.Scalar"):
        return True  # the filled elements count as padding
    if op.short.rstrip("_") == "index_put":
        return not any(each is True for each in op.args)
    return op.short.rstrip("_") in MOVES or op.short == READ


def move(op: Op, operand: Callable[[int], Tensor | None]) -> list[Tensor] | None:
    """Return the identities in the results of an operator that moves elements; None if they are unknown.

    `operand` maps a value's number to its identities in float64, or to its data for indices and masks.
    Every operator accepts float64, and it represents identities exactly up to 2^53.
    """
    if op.short.rstrip("_") == "masked_fill":
        op = replace(op, args=(*op.args[:2], 0.0))
    try:
        made = run(op, operand)
    except NotExecutable:
        return None
    return [each.to(torch.int64) for each in made]


class Elements:
    """Identities of all elements of the single-device program, with an index of their values."""

    def __init__(self, one: Program) -> None:
        self._one = one
        self._bases: list[int] = []
        self._roots: list[int] = []
        self._places: dict[int, int] = {}
        self._size = 0
        self.ids: list[Tensor | None] = []
        self.sources: list[frozenset[int]] = []
        self._sorted: dict[int, tuple[Tensor, Tensor, float]] = {}
        for value in one.values:
            ids = self._number(value.number)
            self.sources.append(self._list_sources(value.number, ids))
            self.ids.append(ids)
        self._starts = torch.tensor(self._bases or [0])
        flats = [self._flat(root) for root in self._roots]
        joined = torch.cat(flats) if flats else torch.zeros(0, dtype=torch.float64)
        self._values, order = torch.sort(joined)
        sizes = torch.tensor([len(each) for each in flats] or [0])
        owners = torch.repeat_interleave(torch.arange(len(flats) or 1), sizes)
        self._owners = owners[order] if flats else torch.zeros(0, dtype=torch.int64)
        self._index_quotients()

    def _index_quotients(self) -> None:
        """Index the quotients of adjacent elements, which a tensor shares with its multiples."""
        quotients, places, owners = [], [], []
        for width, roots in self._group_by_width():
            joined = [self._shaped(root).reshape(-1, width) for root in roots]
            made, at = list_quotients(torch.cat(joined))
            starts = torch.tensor([0, *(each.numel() for each in joined)]).cumsum(0)
            member = torch.bucketize(at, starts, right=True) - 1
            quotients.append(made)
            places.append(at - starts[member])
            owners.append(torch.tensor([self._places[root] for root in roots])[member])
        joined_quotients = torch.cat(quotients) if quotients else torch.zeros(0, dtype=torch.float64)
        self._quotients, order = torch.sort(joined_quotients)
        self._quotient_places = torch.cat(places)[order] if places else order
        self._quotient_owners = torch.cat(owners)[order] if owners else order

    def _group_by_width(self) -> Iterator[tuple[int, list[int]]]:
        """Yield row lengths with the values that have them: one pass over many small tensors."""
        groups: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        for root in self._roots:
            shape = self._one.values[root].shape
            size = math.prod(shape)
            if not shape or shape[-1] < 2 or not size:
                continue
            width = shape[-1]
            if sizes.get(width, 0) + size > _MOST_QUOTIENTS and width in groups:
                yield width, groups.pop(width)
                sizes[width] = 0
            groups.setdefault(width, []).append(root)
            sizes[width] = sizes.get(width, 0) + size
        yield from groups.items()

    def find_factor(self, data: Tensor, prefer: Callable[[int], object]) -> float | None:
        """Return the likely factor by which a tensor is a multiple of single-device elements, or None."""
        made, at = list_quotients(data.to(torch.float64), _MOST_OF_VALUE)
        if len(made) > _NUM_SAMPLES:
            step = len(made) // _NUM_SAMPLES
            made, at = made[::step], at[::step]
        width = TOLERANCE * made.abs()
        first = torch.searchsorted(self._quotients, made - width).tolist()
        last = torch.searchsorted(self._quotients, made + width, right=True).tolist()
        votes: dict[int, list[float]] = {}
        flat = data.reshape(-1).to(torch.float64)
        for begin, end, place in zip(first, last, at.tolist(), strict=True):
            for other in range(begin, min(end, begin + _MOST_HITS)):
                owner = int(self._quotient_owners[other])
                right = float(self._flat(self._roots[owner])[int(self._quotient_places[other])])
                votes.setdefault(owner, []).append(float(flat[place]) / right)
        # Normalized rows have the same quotients but different factors, so the factors must agree.
        best = [
            (owner, found)
            for owner, found in votes.items()
            if len(found) > len(made) * 3 // 4 and max(found) - min(found) <= 1e-6 * abs(found[0])
        ]
        if not best or len(made) < 2:
            return None
        most = max(len(found) for _, found in best)
        _, found = min(
            (each for each in best if len(each[1]) >= most - most // 8),
            key=lambda each: (prefer(self._roots[each[0]]), self._roots[each[0]]),
        )
        return sorted(found)[len(found) // 2]

    def _shaped(self, root: int) -> Tensor:
        data = self._one.values[root].data
        assert data is not None
        return data.detach().to(torch.float64)

    def _flat(self, root: int) -> Tensor:
        data = self._one.values[root].data
        assert data is not None
        return data.detach().reshape(-1).to(torch.float64)

    def _number(self, number: int) -> Tensor | None:
        """Return the identities of a value: passed on for moved elements, new otherwise."""
        value = self._one.values[number]
        if value.data is None or not value.data.is_floating_point():
            return None
        op = self._one.ops[value.op]
        if is_blank(op):
            return None  # uninitialized memory holds arbitrary numbers
        is_moved = value.alias >= 0 or is_move(op)
        if is_moved and op.step < 0:
            is_moved = not is_rounding(value.data, (self._one.values[each].data for each in op.reads()))
        if is_moved:
            made = move(op, self._operand)
            place = op.results.index(number) if number in op.results else 0
            if made is not None and place < len(made) and made[place].shape == value.data.shape:
                return made[place]
        count = value.data.numel()
        self._bases.append(self._size)
        self._places[number] = len(self._roots)
        self._roots.append(number)
        self._size += count
        return torch.arange(self._size - count + 1, self._size + 1).reshape(value.data.shape)

    def _list_sources(self, number: int, ids: Tensor | None) -> frozenset[int]:
        """Return the numbers of the values whose elements a value may contain."""
        if ids is None:
            return frozenset()
        if number in self._places:
            return frozenset((number,))
        op = self._one.op_of(number)
        return frozenset().union(*(self.sources[each] for each in op.reads() if each < len(self.sources)))

    def _operand(self, number: int) -> Tensor | None:
        data = self._one.values[number].data
        if data is not None and not data.is_floating_point():
            return data
        if data is not None and is_blank(self._one.op_of(number)):
            return torch.zeros(data.shape, dtype=torch.float64)
        ids = self.ids[number] if number < len(self.ids) else None
        return None if ids is None else ids.to(torch.float64)

    def root(self, identity: int) -> int:
        """Return the number of the value that computed an element."""
        return self._roots[bisect_right(self._bases, identity - 1) - 1]

    def roots(self, ids: Tensor) -> list[int]:
        """Return the numbers of the values that computed the elements, the most frequent first."""
        return list(self.shares(ids))

    def shares(self, ids: Tensor) -> dict[int, float]:
        """Return the values that computed the elements with their fractions of `ids`, the largest first."""
        flat = ids.reshape(-1)
        flat = flat[flat > 0]
        if not len(flat):
            return {}
        places = torch.bucketize(flat - 1, self._starts, right=True) - 1
        counts = torch.bincount(places)
        found = counts.argsort(descending=True)[: int((counts > 0).sum())]
        return {self._roots[place]: int(counts[place]) / ids.numel() for place in found.tolist()}

    def pick(self, ids: Tensor) -> Tensor:
        """Return the values of elements, with 0 for padding. Same shape as `ids`, float64."""
        out = torch.zeros(ids.shape, dtype=torch.float64)
        for root in self.roots(ids):
            base = self._bases[self._places[root]]
            flat = self._flat(root)
            inside = (ids > base) & (ids <= base + len(flat))
            out[inside] = flat[ids[inside] - base - 1]
        return out

    def find(
        self, data: Tensor, prefer: Callable[[int], object], first: Tensor | None = None
    ) -> Tensor | None:
        """Return the identities of a tensor's elements; None if a nonzero element is not found.

        `prefer` returns a sort key that chooses between tensors with the same elements. `first` is
        `sample(data)`, if it is already computed.
        """
        flat = data.detach().reshape(-1).to(torch.float64)
        ids = torch.zeros(len(flat), dtype=torch.int64)
        left = flat != 0
        for attempt in range(_MOST_ROOTS):
            wanted = sample(flat[left]) if attempt or first is None else first
            root = self._choose(wanted, prefer)
            if root is None:
                break
            found = self._locate(root, flat)
            new = left & (found > 0)
            if not bool(new.any()):
                break
            if not bool(ids.any()) and bool((new == (flat != 0)).all()):
                found = self._straighten(root, data, found).reshape(-1)
            ids[new] = found[new]
            left &= ~new
        return None if bool(left.any()) else ids.reshape(data.shape)

    def _choose(self, wanted: Tensor, prefer: Callable[[int], object]) -> int | None:
        """Return the tensor that contains most elements of a sample."""
        if not len(wanted) or not len(self._values):
            return None
        width = TOLERANCE * wanted.abs()
        first = torch.searchsorted(self._values, wanted - width).tolist()
        last = torch.searchsorted(self._values, wanted + width, right=True).tolist()
        votes: dict[int, int] = {}
        for begin, end in zip(first, last, strict=True):
            for place in set(self._owners[begin : min(end, begin + _MOST_HITS)].tolist()):
                votes[place] = votes.get(place, 0) + 1
        if not votes:
            return None
        most = max(votes.values())
        best = [self._roots[place] for place, count in votes.items() if count >= most - most // 8]
        return min(best, key=lambda root: (prefer(root), root))

    def _locate(self, root: int, flat: Tensor) -> Tensor:
        """Return the identity of each element within one tensor, and 0 where the tensor lacks it."""
        if root not in self._sorted:
            own = self._flat(root)
            values, order = torch.sort(own, stable=True)
            self._sorted[root] = values, order, _measure_size(own)
        values, order, size = self._sorted[root]
        width = _width_of(flat, size)
        before, after = _list_neighbors(values, flat)
        nearest = torch.where((values[after] - flat).abs() <= (values[before] - flat).abs(), after, before)
        is_found = ((values[nearest] - flat).abs() <= width) | (values[nearest] == flat)
        base = self._bases[self._places[root]]
        return torch.where(is_found, order[nearest] + base + 1, 0)

    def _straighten(self, root: int, data: Tensor, found: Tensor) -> Tensor:
        """Return identities in which ties between equal elements form a regular region, if one fits."""
        own = self._one.values[root].data
        assert own is not None
        base = self._bases[self._places[root]]
        size = self._sorted[root][2]
        if own.numel() == data.numel() and own.shape == data.shape and is_near(data, own, size):
            return torch.arange(base + 1, base + 1 + data.numel()).reshape(data.shape)
        index = found.reshape(data.shape) - base - 1
        regular = fit_region(index, own.numel())
        if regular is not None and is_near(data.to(torch.float64), self._flat(root)[regular], size):
            return regular + base + 1
        return found


def list_quotients(data: Tensor, most: int = _MOST_QUOTIENTS) -> tuple[Tensor, Tensor]:
    """Return distinctive quotients of adjacent elements in a row, and flat indices of the first elements.

    At most `most` quotients are looked at.
    """
    if not data.ndim or data.shape[-1] < 2 or not data.numel():
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    rows = data.reshape(-1, data.shape[-1])
    quotients = (rows[:, :-1] / rows[:, 1:]).reshape(-1)
    places = torch.arange(data.numel()).reshape(rows.shape)[:, :-1].reshape(-1)
    is_telling = quotients.isfinite() & (quotients.abs() > 1e-6) & (quotients.abs() < 1e6)
    quotients, places = quotients[is_telling], places[is_telling]
    if len(quotients) > most:
        step = -(-len(quotients) // most)
        keep = torch.arange(0, len(quotients), step)
        quotients, places = quotients[keep], places[keep]
    is_simple = _has_simple_multiple(quotients, _DIVISORS[:16])
    return quotients[~is_simple], places[~is_simple]


def _has_simple_multiple(numbers: Tensor, divisors: Tensor) -> Tensor:
    """Return whether each number times one of the divisors is an integer. Shape (n,) like `numbers`."""
    multiples = numbers[:, None] * divisors
    # In place: a new tensor for each operation takes most of the time.
    distance = multiples.round().sub_(multiples).abs_()
    return (distance <= multiples.abs_().clamp_(min=1.0).mul_(1e-9)).any(1)


def is_near(one: Tensor, two: Tensor, size: float) -> bool:
    """Return whether two tensors of one shape are equal up to `TOLERANCE`."""
    width = _width_of(two, size)
    return bool((((one - two).abs() <= width) | (one == two)).all())


def has_same_numbers(ones: Sequence[Tensor], others: Sequence[Tensor], *, counts: bool = False) -> bool:
    """Return whether tensors hold the same nonzero numbers as others, in any order, up to `TOLERANCE`.

    With `counts`, each number must also occur as often among all numbers: replicas hold it several times.
    """
    sides = [
        torch.cat([each.detach().reshape(-1).to(torch.float64) for each in side]) for side in (ones, others)
    ]
    (one, num_ones), (other, num_others) = (
        torch.unique(side[side != 0], return_counts=True) for side in sides
    )
    if not len(one) or not len(other):
        return len(one) == len(other)
    if not bool(are_among(one, other).all() and are_among(other, one).all()):
        return False
    is_exact = counts and torch.equal(one, other)  # numbers that are only near each other cannot be counted
    return not is_exact or torch.equal(num_ones * num_others.sum(), num_others * num_ones.sum())


def are_among(numbers: Tensor, values: Tensor) -> Tensor:
    """Return whether each number is one of the sorted `values`, up to `TOLERANCE`. Shape of `numbers`."""
    if not len(values):
        return torch.zeros_like(numbers, dtype=torch.bool)
    before, after = _list_neighbors(values, numbers)
    nearest = torch.minimum((values[after] - numbers).abs(), (values[before] - numbers).abs())
    return (nearest <= _width_of(numbers, _measure_size(values))) | (values[after] == numbers)


def _list_neighbors(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the sorted `values` before and after each number, both within `values`."""
    after = torch.searchsorted(values, numbers).clamp(max=len(values) - 1)
    return (after - 1).clamp(min=0), after


def _measure_size(values: Tensor) -> float:
    """Return the root mean square of the finite elements of a tensor; 0 if it has none."""
    finite = values[values.isfinite()]
    return float(finite.square().mean().sqrt()) if len(finite) else 0.0


def _width_of(data: Tensor, size: float) -> Tensor:
    """Return the maximum distance to equal elements; an infinite element equals only itself."""
    return (TOLERANCE * (data.abs() + size)).nan_to_num(0.0, 0.0)


def sample(data: Tensor) -> Tensor:
    """Return some elements that distinguish a tensor: neither 0 nor quotients of small integers."""
    flat = _look_at(data)
    telling = flat[_is_telling(flat)]
    if len(telling) > _NUM_SAMPLES:
        telling = telling[:: -(-len(telling) // _NUM_SAMPLES)]
    return torch.unique(telling)  # type: ignore[no-any-return]


def _look_at(data: Tensor) -> Tensor:
    """Return up to `_NUM_LOOKED_AT` finite, nonzero elements from all parts of a tensor. 1-D, float64."""
    flat = data.detach().reshape(-1).to(torch.float64)
    flat = flat[flat.isfinite() & (flat.abs() > 1e-200)]
    return flat[:: -(-len(flat) // _NUM_LOOKED_AT)] if len(flat) > _NUM_LOOKED_AT else flat


def _is_telling(flat: Tensor) -> Tensor:
    return ~_has_simple_multiple(flat, _DIVISORS) | (flat.abs() > _LARGE)


def says_something(data: Tensor | None) -> bool:
    """Return whether a tensor has elements that distinguish it from other tensors."""
    if data is None or not data.is_floating_point():
        return False
    flat = _look_at(data)
    # Of most tensors the first elements decide.
    return any(bool(_is_telling(part).any()) for part in (flat[:_NUM_FIRST], flat[_NUM_FIRST:]))


def by_bytes(values: Iterable[tuple[int, Tensor | None]]) -> Mapping[object, list[int]]:
    """Group values of integers, masks and simple numbers by their bytes."""
    found: dict[object, list[int]] = {}
    for number, data in values:
        if data is not None and data.numel() and not says_something(data):
            found.setdefault(fingerprint(data), []).append(number)
    return found


def fingerprint(data: Tensor) -> object:
    """Return a hash of a tensor's dtype, shape and bytes."""
    # A copy, since one element may have any stride.
    flat = data.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return str(data.dtype), tuple(data.shape), hash(bytes(flat.view(torch.uint8).numpy()))
