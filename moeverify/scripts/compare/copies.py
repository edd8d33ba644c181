"""Check that different parts of the model on different ranks began with different values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.finding import Finding
from moeverify.results.script import CopyFacts
from moeverify.scripts.compare.places import Places
from moeverify.scripts.record.lines import Values
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.scripts.record.siblings import Parts, find_siblings, make_copy_finding, repeats_siblings

_Lines = dict[str, Values]


def find_copies(expected: RecordedRun, actual: RecordedRun, places: Places) -> Iterator[Finding]:
    """Yield a finding for the first two ranks that drew the same values for different parts of the model.

    The values are those before `--weights` replaced them. `places` says which part a shard is.
    """
    by_rank = {rank.rank: _list_random(rank) for rank in actual.ranks}
    # Data-parallel ranks begin with the same values: one of each kind is enough.
    kinds: dict[object, int] = {}
    for number, lines in by_rank.items():
        kinds.setdefault(tuple((name, line.own) for name, line in lines.items()), number)
    first, *others = by_rank
    # If all ranks hold equal values, these are parts or replicas.
    pairs_of_ranks = (
        combinations(kinds.values(), 2) if len(kinds) > 1 else ((first, other) for other in others)
    )
    repeats = any(
        repeats_siblings(_make_parts(_list_random(rank))) for rank in (*expected.ranks, *actual.ranks)
    )
    for one, two in pairs_of_ranks:
        names = _find_equal_shards((one, by_rank[one]), (two, by_rank[two]), places)
        if names:
            yield make_copy_finding(INITIAL, (one, two), CopyFacts(kind="shards", names=names))
            return
        mine, theirs = (_make_parts(by_rank[rank]) for rank in (one, two))
        pairs = {} if repeats else find_siblings(mine, theirs, is_apart=False)
        if pairs:
            facts = CopyFacts(kind="siblings", names=tuple(pairs), others=tuple(pairs.values()))
            yield make_copy_finding(INITIAL, (one, two), facts)
            return


def _list_random(rank: RankRecord) -> _Lines:
    return {
        name: line
        for (step, kind, name), line in rank.values.items()
        if (step, kind) == (INITIAL, "initial_weight") and line.own
    }


def _make_parts(lines: _Lines) -> Parts:
    return {name: (line.where.shape, line.own) for name, line in lines.items() if not line.is_placed}


def _find_equal_shards(one: tuple[int, _Lines], two: tuple[int, _Lines], places: Places) -> tuple[str, ...]:
    """Return the tensors with equal values in the different parts of two ranks, if most are equal."""
    (first, mine), (second, theirs) = one, two
    is_equal: dict[str, bool] = {}
    for name in mine.keys() & theirs.keys():
        placed = [places.known.get((rank, name)) for rank in (first, second)]
        if placed[0] is None or placed[1] is None or placed[0].name != placed[1].name:
            continue
        regions = [each.region for each in placed if each is not None]
        if regions[0].key != regions[1].key and regions[0].local_shape == regions[1].local_shape:
            is_equal[name] = mine[name].own == theirs[name].own
    names = tuple(name for name in mine if is_equal.get(name))
    return names if 2 * len(names) >= len(is_equal) else ()
