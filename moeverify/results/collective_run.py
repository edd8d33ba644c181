"""A single collective with the inputs, the expected outputs and the actual outputs of each rank. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from moeverify.results.collective_name import CollectiveName
from moeverify.results.record import Record


class TensorSpan(Record):
    """Consecutive elements of a tensor that travel together.

    `origin` is the rank that sends them. It is None for a sum over all ranks, and for zeros that no rank
    sends.
    """

    origin: int | None
    values: tuple[float, ...]


Parts = tuple[TensorSpan, ...]


class RankTransfer(Record):
    """The input of one rank, and its output by the definition of the collective.

    `sends` and `receives` are the sizes of the parts of `input` and `output`. `output_gradient` is the
    gradient of the rank's output. `input_gradient` is the resulting gradient of its input, for the sum of
    the losses of all ranks.
    """

    rank: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    input: Parts
    output: Parts
    output_gradient: Parts
    input_gradient: Parts


class Transfer(Record):
    """One collective on all ranks. `source` is the source rank of a broadcast.

    `padded_to` is above 0 if the collective only supports parts of equal size: each part is then padded to
    this size.
    """

    collective: CollectiveName
    source: int = 0
    padded_to: int = 0
    ranks: tuple[RankTransfer, ...]


class RankOutput(Record):
    """The output of one rank. `input_gradient` is None if no backward pass ran."""

    rank: int
    host: str = ""
    output: tuple[float, ...]
    input_gradient: tuple[float, ...] | None = None


class CollectiveRun(Record):
    """A transfer and the output of each rank, in rank order."""

    transfer: Transfer
    values: tuple[RankOutput, ...]
    environment: dict[str, str]

    @property
    def wrong_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose output or gradient differs from the definition in any bit."""
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
    """Return the elements of all parts in order."""
    return tuple(_iterate(parts))


def _iterate(parts: Parts) -> Iterator[float]:
    for part in parts:
        yield from part.values
