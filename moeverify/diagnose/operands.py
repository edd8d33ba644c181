"""What ranks bring to the all-reduces of a module, beside the golden's tensor that these should make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.rank_readings import RankReadings, locate_tokens
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.results.trace import CollectiveRecord


@dataclass(frozen=True)
class Operand:
    """A tensor that a rank brought to an all-reduce, in one micro-batch.

    `spans` are the directions and modules inside of which it was issued. Shape: (rows, positions, ...).
    """

    collective: CollectiveRecord
    micro_batch: int
    spans: frozenset[tuple[str, str]]
    local: Tensor


@dataclass(frozen=True, eq=False)
class ReducedTensor:
    """What all ranks brought to one all-reduce, as a tensor whose golden is what a module should have there.

    `collectives` has the record of each rank, in its first micro-batch.
    """

    tensor: WrongTensor
    collective: CollectiveRecord
    collectives: Mapping[int, CollectiveRecord] = field(default_factory=dict)


def find_operands(
    search: Search,
    by_rank: Sequence[tuple[RankReadings, Sequence[Operand]]],
    coordinates: Mapping[int, Mapping[str, int]],
    tp: int,
) -> Search:
    """Return the search with what was all-reduced inside the module of each origin, in the shape of its tensor."""

    def add(origin: Origin) -> Origin:
        return replace(origin, reduced=tuple(_match(origin, by_rank, coordinates, tp)))

    origins = {direction: add(origin) for direction, origin in search.origins.items()}
    around = {direction: tuple(map(add, found)) for direction, found in search.around.items()}
    return replace(search, origins=origins, around=around)


def _match(
    origin: Origin,
    by_rank: Sequence[tuple[RankReadings, Sequence[Operand]]],
    coordinates: Mapping[int, Mapping[str, int]],
    tp: int,
) -> list[ReducedTensor]:
    """Return the all-reduces that ranks issued as one another, the first of each rank and micro-batch and so on."""
    expected = origin.tensor.expected
    shards: dict[tuple[int, str], list[RankShard]] = {}
    collectives: dict[tuple[int, str], dict[int, CollectiveRecord]] = {}
    for rank, (readings, operands) in enumerate(by_rank):
        counts: dict[int, int] = {}
        for operand in operands:
            is_placed = operand.micro_batch < len(readings.shares)
            if (origin.direction, origin.culprit) not in operand.spans or not is_placed:
                continue
            rows, positions = readings.shares[operand.micro_batch]
            place = (coordinates.get(rank, {}).get("tp", 0), tp)
            region = locate_tokens(expected, operand.local, rows, positions, place)
            if region is None:
                continue
            number = counts[operand.micro_batch] = counts.get(operand.micro_batch, -1) + 1
            key = (number, operand.collective.site)
            shards.setdefault(key, []).append(RankShard(rank, region, operand.local))
            collectives.setdefault(key, {}).setdefault(rank, operand.collective)
    return [
        ReducedTensor(
            replace(origin.tensor, shards=tuple(found)),
            next(iter(collectives[key].values())),
            collectives[key],
        )
        for key, found in sorted(shards.items())
    ]
