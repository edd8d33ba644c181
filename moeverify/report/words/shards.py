"""Products that ranks divide, and their sums, otherwise than they should be, in words."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.change import Change

_CHUNKS: Mapping[str, str] = {
    "chunk-of-own": "each rank's own positions in the place of those of all ranks",
    "chunk-next": "the positions of the next rank over tp in the place of each rank's",
    "chunk-before": "the positions of the rank before over tp in the place of each rank's",
    "chunks-reversed": "the positions of the ranks of tp in reverse order",
    "chunk-first": "the positions of the first rank of tp in the place of each rank's",
    "chunks-summed": "the sum over the positions of all ranks of tp in the place of each rank's",
    "chunks-mean": "the mean over the positions of all ranks of tp in the place of each rank's",
}
_SUMS: Mapping[str, str] = {
    "own": "with each rank's own part alone: the sum over tp is missing",
    "not-own": "without each rank's own part in the sum over tp",
    "own-twice": "with each rank's own part twice in the sum over tp",
    "own-times": "with each rank's own part in the place of those of all ranks of tp",
    "without": "without the part of rank {number} of tp in the sum",
    "only": "with the part of rank {number} of tp alone, in place of the sum",
    "weights-own": "with the rank's own slice of the weight for the slices of all ranks of tp",
    "weights-next": "with the slice of the weight of the next rank over tp for that of each rank",
    "weights-before": "with the slice of the weight of the rank before over tp for that of each rank",
    "weights-reversed": "with the slices of the weight in reverse order of the ranks of tp",
    "weights-first": "with the slice of the weight of the first rank of tp for those of all",
    "inputs-own": "with the rank's own slice for the slices of all ranks of tp, times the weight of each",
    "of-position": "with the part of the rank alone that has a position, in place of the sum over tp",
    "not-of-position": "without the part of the rank that has a position in the sum over tp",
    "weights-of-position": "with the slice of the weight of the rank that has a position for those of all ranks",
    "inputs-of-position": "with the slice of the rank that has a position for those of all ranks, times each one's "
    "weight",
    "own-chunks": "with the sum of what each rank of tp makes of its own positions, in the place of each rank's",
}
_SLICES: Mapping[str, str] = {
    "next": "the slice of the next rank over tp in the place of each rank's",
    "before": "the slice of the rank before over tp in the place of each rank's",
    "reversed": "the slices of the ranks of tp in reverse order",
    "first": "the slice of the first rank of tp on all of them",
    "summed": "the sum of the slices of all ranks of tp on each, which are no parts of a sum",
    "mean": "the mean of the slices of all ranks of tp on each",
    "of-position": "the slice of the rank that has a position in the place of each rank's own",
    "exchanged": "ranks of tp and their positions exchanged",
    "own-chunk-alone": "zeros at the positions of the other ranks of tp",
    "not-own-chunk": "zeros at the positions of the rank itself",
}


def describe_shards(change: Change, number: str) -> str:
    """Return how what ranks divide is otherwise; nothing for what is no such change."""
    part, way = change.part, change.way
    if part == "sum-over-ranks":
        return _SUMS[way].format(number=number) if way in _SUMS else f"with {_CHUNKS[way]}"
    if part != "slices-of-ranks":
        return ""
    of = ", of the gradient that comes back from its last layer" if change.name == "given" else ""
    return f"with {_SLICES.get(way) or _CHUNKS[way]}{of}"
