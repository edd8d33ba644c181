"""Location of every rank's tensors in the logical tensors, by placements or by initial values.

DTensors and flat FSDP1 parameters define their regions. A plain tensor is located by its values. It may be
the logical tensor of its name, slices of it along one dim, or a tensor with another number: `experts.0` of
rank 1 may be `experts.2`. Ranks that begin with the weights of the other run therefore need no description.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.errors import FormatError
from moeverify.explain.fitting.families import name_family
from moeverify.parallel.regions.observer import INITIAL
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.facts import CoverageFacts
from moeverify.results.finding import Finding
from moeverify.results.operation import RepeatedShard
from moeverify.scripts.record.lines import Values
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.scripts.record.tensors import make_region
from moeverify.verification.compare.difference import as_words, hash_words


@dataclass(frozen=True)
class Placed:
    """A logical tensor and the region of it that a rank has."""

    name: str
    region: Region


@dataclass
class Places:
    """The locations of shards by (rank, name); `unknown` has the shapes of shards without a location."""

    known: dict[tuple[int, str], Placed] = field(default_factory=dict)
    unknown: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)

    def replicated(self, num_ranks: int) -> set[str]:
        """Return the names of the logical tensors that every rank has whole."""
        counts: dict[str, int] = {}
        for placed in self.known.values():
            counts[placed.name] = counts.get(placed.name, 0) + placed.region.is_whole
        return {name for name, count in counts.items() if count == num_ranks}


def find_places(expected: RecordedRun, actual: RecordedRun) -> Places:
    """Return the locations of the shards of `actual` in the logical tensors of `expected`.

    Raises: FormatError when no shard has a location.
    """
    wholes = {name: expected.read_whole(Kind.INITIAL_WEIGHT, name) for name in expected.names}
    known = {name: whole for name, whole in wholes.items() if whole is not None}
    places = Places()
    for rank in actual.ranks:
        for (step, _, name), line in rank.values.items():
            if step == INITIAL:
                placed = _place(rank, line, name, known)
                if placed is None:
                    places.unknown[rank.rank, name] = line.where.shape
                else:
                    places.known[rank.rank, name] = placed
    _place_by_neighbours(places, known, actual.world_size)
    if not places.known:
        raise FormatError(
            f"no parameter of {actual.folder} is one of {expected.folder}: they train other models",
            "name two runs of one script",
        )
    return places


def _place(rank: RankRecord, line: Values, name: str, known: Mapping[str, Tensor]) -> Placed | None:
    region, own = make_region(line.where), known.get(name)
    if line.is_placed:
        return Placed(name, region) if own is not None and tuple(own.shape) == region.shape else None
    local = rank.read(line)
    if local is None:
        return None
    if own is not None and tuple(own.shape) == tuple(local.shape) and torch.equal(own, local):
        return Placed(name, region)
    for other in _list_siblings(name, known):
        if known[other].shape == local.shape and torch.equal(known[other], local):
            return Placed(other, region)
    found = None if own is None else _find_slices(own, local)
    if found is not None:
        return Placed(name, found)
    # No values match. If the shape fits, assume the tensor of that name with other initial values.
    return Placed(name, region) if own is not None and own.shape == local.shape else None


def _list_siblings(name: str, known: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names that differ from this one only in numbers."""
    skeleton = re.sub(r"\d+", "*", name)
    yield from (other for other in known if other != name and re.sub(r"\d+", "*", other) == skeleton)


def _find_slices(whole: Tensor, local: Tensor) -> Region | None:
    """Return the region of `whole` with the values `local`: slices along the one differing dim, or None."""
    dim = _unequal_dim(tuple(whole.shape), tuple(local.shape))
    if dim is None or whole.dtype != local.dtype:
        return None
    theirs: dict[int, list[int]] = {}
    for index, value in enumerate(_hash_slices(whole, dim)):
        theirs.setdefault(value, []).append(index)
    indices: list[int] = []
    for value in _hash_slices(local, dim):
        matching = theirs.get(value, [])
        if len(matching) != 1:  # none, or equal slices such as zeros, whose order is unknown
            return None
        indices.append(matching[0])
    dims: list[range | list[int]] = [range(size) for size in whole.shape]
    dims[dim] = indices
    return Region.box(whole.shape, dims)


def _hash_slices(tensor: Tensor, dim: int) -> list[int]:
    rows = tensor.movedim(dim, 0).contiguous()
    hashed = []
    for row in rows:
        words, rest = as_words(row)
        both = torch.cat([words, rest])
        hashed.append(int(hash_words(both, torch.arange(len(both))).sum()))
    return hashed


def _unequal_dim(first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
    """Return the one dim in which two shapes differ, or None for no or several such dims."""
    if len(first) != len(second):
        return None
    unequal = [dim for dim, sizes in enumerate(zip(first, second, strict=True)) if sizes[0] != sizes[1]]
    return unequal[0] if len(unequal) == 1 else None


def _place_by_neighbours(places: Places, known: Mapping[str, Tensor], world_size: int) -> None:
    """Locate tensors without distinctive values, such as zeros, like another tensor of their module.

    If no other tensor helps and a tensor has as many equal parts as there are ranks, its parts are assigned
    in rank order. If that is wrong the values differ, which the comparison of initial weights reports.
    """
    for (rank, name), shape in list(places.unknown.items()):
        whole = known.get(name)
        dim = None if whole is None else _unequal_dim(tuple(whole.shape), shape)
        if whole is None or dim is None:
            continue
        module, size, total = name.rpartition(".")[0], shape[dim], whole.shape[dim]
        indices = next(
            (
                placed.region.dims[dim]
                for (other, sibling), placed in places.known.items()
                if other == rank
                and sibling.rpartition(".")[0] == module
                and len(placed.region.dims) > dim
                and len(placed.region.dims[dim]) == size
                and placed.region.shape[dim] == total
            ),
            range(rank * size, (rank + 1) * size) if size * world_size == total else None,
        )
        if indices is not None:
            dims: list[range | tuple[int, ...]] = [range(each) for each in whole.shape]
            dims[dim] = indices
            places.known[rank, name] = Placed(name, Region.box(whole.shape, dims))
            del places.unknown[rank, name]


def find_repeated_parts(places: Places) -> Iterator[Finding]:
    """Yield a finding for tensors of which two ranks hold the same part while no rank holds another part.

    Tensors are located by their initial values. If several ranks start with the values of one part although
    each should have a part of its own, all of them are located at that part. Tensors with the same two first
    ranks there share a finding.
    """
    by_name: dict[str, dict[str, list[int]]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for (rank, _), placed in places.known.items():
        regions = by_name.setdefault(placed.name, {})
        num_known, _ = sizes.get(placed.name, (0, 0))
        if placed.region.key not in regions:
            num_known += placed.region.numel
        sizes[placed.name] = num_known, math.prod(placed.region.shape)
        regions.setdefault(placed.region.key, []).append(rank)
    groups: dict[tuple[int, int], list[str]] = {}
    for name, (num_known, numel) in sizes.items():
        same = next((ranks for ranks in by_name[name].values() if len(ranks) > 1), None)
        if num_known < numel and same is not None:
            groups.setdefault((same[0], same[1]), []).append(name)
    for ranks, names in groups.items():
        num_known, numel = sizes[names[0]]
        subject = Subject(quantity=Quantity.INITIAL_VALUE, tensors=tuple(names), family=name_family(names))
        explanation = Explanation(
            cause=Cause.DUPLICATE, subject=subject, operation=RepeatedShard(ranks=ranks)
        )
        yield Finding(
            check=CheckName.COVERAGE,
            kind=Kind.INITIAL_WEIGHT,
            tensor=names[0],
            step=INITIAL,
            rank=ranks[1],
            ranks=ranks,
            error=1 - num_known / numel,
            bound=0.0,
            explanation=explanation,
            code=explanation.cause.value,
            facts=CoverageFacts(num_held=num_known, num_elements=numel),
        )
