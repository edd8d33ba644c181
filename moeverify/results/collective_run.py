"""One collective run by itself: what each rank gives and should get, and what it got. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.results.collective_name import Collective
from moeverify.results.record import Record


class Part(Record):
    """Consecutive elements of a tensor that travel together.

    `origin` is the rank that they come from, None for a sum over all ranks or for zeros that come from none.
    """

    origin: int | None
    values: tuple[float, ...]


Parts = tuple[Part, ...]


class RankTransfer(Record):
    """What one rank gives and, by the definition of the collective, gets.

    `sends` and `receives` are the sizes of the parts of `input` and `output`. `output_gradient` is the gradient that
    the rank has of its output; `input_gradient` is what follows of its input, of the sum of all ranks' losses.
    """

    rank: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    input: Parts
    output: Parts
    output_gradient: Parts
    input_gradient: Parts


class Transfer(Record):
    """One collective on all ranks: `source` is the rank that a broadcast begins at, `padded_to` the size of a part.

    A collective that takes parts of one size alone is given padded ones; then `padded_to` is above 0.
    """

    collective: Collective
    source: int = 0
    padded_to: int = 0
    ranks: tuple[RankTransfer, ...]


class RankValues(Record):
    """What one rank got: `input_gradient` only where the backward ran."""

    rank: int
    host: str = ""
    output: tuple[float, ...]
    input_gradient: tuple[float, ...] | None = None


class CollectiveRun(Record):
    """A transfer and what each rank got, in the order of the ranks."""

    transfer: Transfer
    values: tuple[RankValues, ...]
    environment: dict[str, str]

    @property
    def wrong_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose output or gradient is not, bit for bit, what the definition says."""
        return tuple(
            expected.rank
            for expected, actual in zip(self.transfer.ranks, self.values, strict=True)
            if flatten(expected.output) != actual.output
            or (
                actual.input_gradient is not None
                and flatten(expected.input_gradient) != actual.input_gradient
            )
        )


def flatten(parts: Parts) -> tuple[float, ...]:
    """Return the elements of all parts in their order."""
    return tuple(_iterate(parts))


def _iterate(parts: Parts) -> Iterator[float]:
    for part in parts:
        yield from part.values
