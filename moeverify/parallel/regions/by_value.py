"""Matching of local tensors to regions of logical parameters by their values.

The initial weights of the whole model are known. Each local tensor is searched for in them as one of:
- a slice along any dim, strided or in packed blocks;
- a transposed tensor;
- one slice of a stack of experts;
- several logical tensors fused along the first dim;
- a flat buffer.

Every candidate region is compared value by value before it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations

import torch
from torch import Tensor

from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Indices, Region, as_indices

# Maximum number of positions to try for the first element. A tensor of ones matches everywhere, so its
# values cannot place it.
_MOST_ANCHORS = 64


@dataclass(frozen=True)
class RegionOfValues:
    """A logical tensor and the region of it whose values equal a local tensor seen through `view`."""

    name: str
    region: Region
    view: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Unplaced:
    """A local tensor without a certain place; `candidates` are the logical tensors that may contain it."""

    name: str
    shape: tuple[int, ...]
    candidates: tuple[str, ...]


class LogicalTensor:
    """A whole tensor that can be searched for values."""

    def __init__(self, name: str, values: Tensor) -> None:
        self.name = name
        self.values = values.detach()

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        found = self.values.reshape(-1).sort(stable=True)
        return found.values, found.indices

    def find(self, value: Tensor) -> list[int]:
        """Return the row-major positions of a value (), at most `_MOST_ANCHORS` + 1 of them."""
        values, positions = self._sorted
        value = value.to(values.dtype).reshape(1)
        first = int(torch.searchsorted(values, value))
        last = min(int(torch.searchsorted(values, value, right=True)), first + _MOST_ANCHORS + 1)
        return [int(position) for position in positions[first:last]]

    def unravel(self, position: int) -> tuple[int, ...]:
        """Return the index of a row-major position."""
        found = []
        for size in reversed(self.values.shape):
            position, index = divmod(position, size)
            found.append(index)
        return tuple(reversed(found))


def place_by_value(
    tensors: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    *,
    names: Mapping[str, str] | None = None,
    regions: Mapping[str, Region] | None = None,
) -> tuple[list[LocalShard], list[Unplaced]]:
    """Return this rank's shards of the parameters, and the tensors whose place is not certain.

    `tensors` are the local tensors and `whole` the initial values of all parameters, both by name. `names`
    limits the search for a local tensor to one parameter. `regions` gives the known region of a local tensor,
    whose values are then not checked.

    Where values occur in several parameters, these are preferred in order: the parameter of the tensor's
    own name, then the parameter of its module with a similar name (see `find_namesake`). The place is
    not certain if a namesake has the values only in another shape and another parameter has them unchanged. If
    values occur nowhere else, a tensor with the name and shape of a parameter is that parameter, whatever
    its values are. If values occur at several places of one parameter, adjacent indices are preferred.

    Example: a rank that calls its only expert number 0 and holds the third of four.

        place_by_value({"experts.0.w": w}, {"experts.0.w": ..., ..., "experts.3.w": ...})
    """
    logical = {name: LogicalTensor(name, values) for name, values in whole.items()}
    shards: list[LocalShard] = []
    unplaced: list[Unplaced] = []
    for local_name, tensor in tensors.items():
        name = (names or {}).get(local_name)
        region = (regions or {}).get(local_name)
        if region is not None:
            shards.append(LocalShard(name or local_name, tensor, region))
            continue
        searched = logical if name is None else {name: logical[name]}
        places = find_places(local_part(tensor).detach(), searched, own_name=name or local_name)
        if isinstance(places, Unplaced):
            unplaced.append(places)
        shards += [LocalShard(place.name, tensor, place.region, place.view) for place in _certain(places)]
    return shards, unplaced


def place_region(
    shard: LocalShard, whole: Mapping[str, Tensor], taken: Collection[str] = ()
) -> LocalShard | Unplaced | None:
    """Return the shard under the name of the parameter whose values its region has.

    Use it for tensors with known placements but unknown names, such as DTensors. `whole` are the initial
    values of all parameters, by name; `taken` are the names of other tensors of this rank.

    If no parameter has the values, the parameter with the same or a similar name is used, and the
    comparison then reports wrong values. Returns `Unplaced` when several parameters match, and None when no
    parameter matches.
    """
    alike = {name: values for name, values in whole.items() if tuple(values.shape) == shard.region.shape}
    local = shard.local()
    found = [name for name, values in alike.items() if _equal(shard.region.take(values.detach()), local)]
    if shard.region.numel == 0:  # an empty region equals any other: only the name matters
        found = sorted(found, key=lambda name: name in taken)[:1] if shard.name not in alike else [shard.name]
    name = find_namesake(shard.name, found or [each for each in alike if each not in taken])
    if name is None and len(found) == 1:
        name = found[0]
    if name is not None:
        return replace(shard, name=name)
    return Unplaced(shard.name, tuple(local.shape), tuple(found)) if found else None


def find_namesake(own_name: str, names: Collection[str]) -> str | None:
    """Return the name that equals a local name, or the name in the same module that it contains.

    `attention.k_norm.weight_shard` matches `attention.k_norm.weight` and not `attention.q_norm.weight`. The
    longest contained name wins. Returns None without a match.
    """
    if own_name in names:
        return own_name
    module, _, last = own_name.rpartition(".")
    parts = {name: name.rpartition(".") for name in names}
    near = [name for name, (of, _, part) in parts.items() if of == module and part in last]
    return max(near, key=len, default=None)


def _certain(places: Sequence[RegionOfValues] | Unplaced) -> Sequence[RegionOfValues]:
    return () if isinstance(places, Unplaced) else places


def find_places(
    local: Tensor, logical: Mapping[str, LogicalTensor], own_name: str
) -> Sequence[RegionOfValues] | Unplaced:
    """Return the place of a local tensor, or several places where logical tensors are fused in it."""
    own = logical.get(own_name)
    if own is not None and own.values.shape == local.shape and _equal(own.values, local):
        return [RegionOfValues(own_name, Region.whole(local.shape), _keep)]
    found = [place for tensor in logical.values() for place in _find_in(local, tensor)]
    found = _prefer(found, own_name)
    if len(found) == 1:
        return found
    if not found and (fused := _find_fused(local, logical)):
        return fused
    if not found and own is not None and own.values.shape == local.shape:
        return [RegionOfValues(own_name, Region.whole(local.shape), _keep)]  # values differ: a mismatch
    return Unplaced(own_name, tuple(local.shape), tuple(dict.fromkeys(place.name for place in found)))


def _prefer(found: list[RegionOfValues], own_name: str) -> list[RegionOfValues]:
    """Return the preferred places: those of the tensor's own name, and of these the one in unchanged shape.

    If only other parameters have the values in unchanged shape, the result contains both and is ambiguous.
    Rounded values often occur at several places of one parameter; a place of adjacent indices is then
    preferred.
    """
    namesake = find_namesake(own_name, {place.name for place in found})
    own = [place for place in found if place.name == namesake]
    as_they_are = [place for place in found if place.view is _keep]
    if own and as_they_are and not any(place.view is _keep for place in own):
        return own + as_they_are
    own = own or found
    if len({place.name for place in own}) > 1:
        return own
    unchanged = [place for place in own if place.view is _keep]
    adjacent = [place for place in unchanged if all(isinstance(dim, range) for dim in place.region.dims)]
    return next((places for places in (unchanged, adjacent) if len(places) == 1), own)


def _find_in(local: Tensor, logical: LogicalTensor) -> Iterator[RegionOfValues]:
    """Yield the distinct regions of one logical tensor that have the local values."""
    if not local.numel() or local.numel() > logical.values.numel():
        return
    seen: set[str] = set()
    for view in _list_views(local, logical.values.ndim, tuple(logical.values.shape)):
        seen_as = view(local)
        for region in _find_boxes(seen_as, logical):
            if region.key not in seen:
                seen.add(region.key)
                yield RegionOfValues(logical.name, region, view)
    if local.ndim == 1 and logical.values.ndim > 1:
        yield from _find_runs(local, logical)


def _list_views(local: Tensor, num_dims: int, shape: tuple[int, ...]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield functions that view a local tensor with the logical number of dims; the identity comes first."""
    if local.ndim == num_dims:
        yield _keep
        for order in permutations(range(num_dims)):
            if order != tuple(range(num_dims)) and num_dims <= 3:
                yield partial(_permute, order=order)
    elif local.ndim == num_dims - 1:
        yield _stack  # one slice of a stack
        if local.ndim == 2:
            yield _stack_transposed
            inner = shape[1:]
            for rows, is_transposed in ((inner[0], False), (inner[1], True)):
                if local.shape[0] % rows == 0 and local.shape[0] > rows:
                    yield partial(_unstack, rows=rows, is_transposed=is_transposed)


def _find_boxes(local: Tensor, logical: LogicalTensor) -> Iterator[Region]:
    """Yield the boxes of the logical tensor that equal the local tensor, with any indices per dim."""
    if any(part > size for part, size in zip(local.shape, logical.values.shape, strict=True)):
        return
    anchors = logical.find(local[(0,) * local.ndim])
    if len(anchors) > _MOST_ANCHORS:
        # Too many equal values to search: only a whole tensor is certain.
        if local.shape == logical.values.shape and _equal(local, logical.values):
            yield Region.whole(local.shape)
        return
    for position in anchors:
        anchor = logical.unravel(position)
        # One line along each dim through the first element determines a box, which is then compared.
        dims = [_match_line(local, logical.values, anchor, dim) for dim in range(local.ndim)]
        if any(indices is None for indices in dims):
            continue
        region = Region.box(logical.values.shape, [indices for indices in dims if indices is not None])
        if _equal(region.take(logical.values), local):
            yield region


def _match_line(local: Tensor, whole: Tensor, anchor: tuple[int, ...], dim: int) -> Indices | None:
    """Return the logical indices along `dim` of the local tensor, on the line through its first element.

    Where a value occurs several times on the line, the index after the previous one is preferred.
    """
    wanted = local[tuple(slice(None) if each == dim else 0 for each in range(local.ndim))]
    line = whole[tuple(slice(None) if each == dim else at for each, at in enumerate(anchor))]
    if wanted.numel() == 1:
        return range(anchor[dim], anchor[dim] + 1)
    order = line.argsort(stable=True)
    ordered = line[order]
    first = torch.searchsorted(ordered, wanted.contiguous())
    last = torch.searchsorted(ordered, wanted.contiguous(), right=True)
    found: list[int] = []
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        choices = order[begin:end].tolist()
        following = anchor[dim] if not found else found[-1] + 1
        # Recent indices only: a search through all would be quadratic.
        unused = [index for index in choices if index not in found[-64:]]
        if not unused:
            return None
        found.append(following if following in unused else unused[0])
    return as_indices(found)


def _find_runs(local: Tensor, logical: LogicalTensor) -> Iterator[RegionOfValues]:
    flat = logical.values.reshape(-1)
    anchors = logical.find(local[0])
    for start in anchors if len(anchors) <= _MOST_ANCHORS else ():
        stop = start + local.numel()
        if stop <= flat.numel() and _equal(flat[start:stop], local):
            yield RegionOfValues(logical.name, Region.run(logical.values.shape, start, stop), _keep)


def _find_fused(local: Tensor, logical: Mapping[str, LogicalTensor]) -> list[RegionOfValues]:
    """Return the logical tensors fused in a local one along dim 0; empty if a row matches none of them.

    Trailing zeros of a flat buffer count as padding.
    """
    if local.ndim == 1:
        return _find_flat(local, logical)
    owners: list[str] = []
    for row in range(local.shape[0]):
        one = local[row : row + 1]
        names = {tensor.name for tensor in logical.values() for _ in _find_in(one, tensor)}
        if len(names) != 1:
            return []
        owners.append(names.pop())
    places: list[RegionOfValues] = []
    begin = 0
    for row in range(1, len(owners) + 1):
        if row < len(owners) and owners[row] == owners[begin]:
            continue
        part = local[begin:row]
        found = list(_find_in(part, logical[owners[begin]]))
        if len(found) != 1:
            return []
        view = partial(_narrow, start=begin, stop=row, inner=found[0].view)
        places.append(RegionOfValues(owners[begin], found[0].region, view))
        begin = row
    return places


def _find_flat(local: Tensor, logical: Mapping[str, LogicalTensor]) -> list[RegionOfValues]:
    places: list[RegionOfValues] = []
    begin = 0
    while begin < local.numel():
        runs = [
            (length, tensor, start)
            for tensor in logical.values()
            for start in tensor.find(local[begin])[:_MOST_ANCHORS]
            if (length := _count_equal(local[begin:], tensor.values.reshape(-1)[start:])) > 1
            or tensor.values.numel() == 1
        ]
        longest = max((length for length, _, _ in runs), default=0)
        best = [run for run in runs if run[0] == longest]
        if len(best) != 1:
            return places if not bool(local[begin:].any()) else []
        length, tensor, start = best[0]
        region = Region.run(tensor.values.shape, start, start + length)
        places.append(
            RegionOfValues(
                tensor.name, region, partial(_narrow, start=begin, stop=begin + length, inner=_keep)
            )
        )
        begin += length
    return places


def _count_equal(one: Tensor, other: Tensor) -> int:
    size = min(one.numel(), other.numel())
    differing = (one[:size] != other[:size].to(one.dtype)).nonzero()
    return int(differing[0]) if differing.numel() else size


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other.to(one.dtype)).all())


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _permute(tensor: Tensor, *, order: tuple[int, ...]) -> Tensor:
    return tensor.permute(order)


def _stack(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


def _stack_transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _unstack(tensor: Tensor, *, rows: int, is_transposed: bool) -> Tensor:
    apart = tensor.view(-1, rows, tensor.shape[-1])
    return apart.transpose(1, 2) if is_transposed else apart


def _narrow(tensor: Tensor, *, start: int, stop: int, inner: Callable[[Tensor], Tensor]) -> Tensor:
    return inner(tensor[start:stop])
