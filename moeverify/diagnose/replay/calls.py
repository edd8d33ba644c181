"""The calls of a module: which tokens each rank gives it at once, in each micro-batch.

The gradient of a parameter is a sum over calls, and a backward pass knows the tokens of its own call alone.

Letters: b rows, s positions and n heads of one call; B, S and N of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.diagnose.rank_readings import AllReadings, Coordinates, RankReadings
from moeverify.diagnose.replay.exchange import Call as Exchange
from moeverify.layout.region import Indices
from moeverify.train.module_taps import FORWARD, Reading

Key = tuple[Indices, ...]

MICRO_BATCHES: Mapping[str, Callable[[int, int], int]] = {
    "of-micro-batch-before": lambda number, last: max(number - 1, 0),
    "of-micro-batch-after": lambda number, last: min(number + 1, last),
    "of-micro-batch-before-around": lambda number, last: (number - 1) % (last + 1),
    "of-micro-batch-after-around": lambda number, last: (number + 1) % (last + 1),
    "of-first-micro-batch": lambda number, last: 0,
    "of-last-micro-batch": lambda number, last: last,
}
"""Which micro-batch a saved tensor may be of, by the right one and the last of the rank."""


@dataclass(frozen=True)
class ModuleCall:
    """What the ranks take in one call, as numbers `at` (b, s) or (b, s, n) in the flattened whole.

    `ranks` all take the same. Copies of tokens that one expert takes are a single row of so many positions.
    """

    ranks: tuple[int, ...]
    micro_batch: int
    at: Tensor
    rows: Tensor
    positions: Tensor


class ModuleCalls:
    """Gives the calls of each module, by what ranks read at it."""

    def __init__(
        self,
        by_rank: Sequence[RankReadings] = (),
        coordinates: Coordinates | None = None,
        tp: int = 1,
        golden: Sequence[Reading] = (),
    ) -> None:
        self._by_rank, self._coordinates, self._tp, self._golden = by_rank, coordinates or {}, tp, golden
        self._readings: AllReadings | None = None

    def find(self, module: str, shape: Sequence[int], end: str = "input") -> list[ModuleCall]:
        """Return the calls of a module whose tokens have this shape (B, S) or (B, S, N); one where not known.

        What has no input that was read, as an embedding, takes all that a rank has of a micro-batch.
        """
        golden = next((each for each in self._golden if self._is_end(each, module, end)), None)
        found = self._list_shares() if golden is None else self._list_read(golden)
        calls = _join(found, shape)
        is_whole = bool(calls) and torch.equal(
            torch.cat([call.at.flatten() for call in calls]).sort().values, torch.arange(math.prod(shape))
        )
        return calls if is_whole else [whole_call(shape)]

    def divides(self, module: str, end: str) -> bool:
        """Return whether ranks have slices of what one device reads at an end of a module, along its last dim."""
        golden = next((each for each in self._golden if self._is_end(each, module, end)), None)
        wanted = (FORWARD, module, end, "0")
        return golden is not None and any(
            each.local.shape[-1] < golden.local.shape[-1]
            for read in self._by_rank
            for each in read.readings
            if (each.direction, each.module, each.end, each.slot) == wanted
        )

    def _is_end(self, reading: Reading, module: str, end: str) -> bool:
        wanted = (FORWARD, module, end, "0")
        return (reading.direction, reading.module, reading.end, reading.slot) == wanted

    def _list_shares(self) -> list[tuple[int, int, Key]]:
        return [
            (rank, number, share)
            for rank, read in enumerate(self._by_rank)
            for number, share in enumerate(read.shares)
        ]

    def _list_read(self, golden: Reading) -> list[tuple[int, int, Key]]:
        if not self._by_rank:
            return []
        if self._readings is None:
            self._readings = AllReadings(self._by_rank, self._coordinates, self._tp, torch.float64)
        found = self._readings.gather(golden)
        if found is None:
            return []
        tensor, micro_batches, _ = found
        return [
            (shard.rank, number, shard.region.dims[:-1])
            for shard, number in zip(tensor.shards, micro_batches, strict=True)
        ]


def whole_call(shape: Sequence[int]) -> ModuleCall:
    """Return the call of a module that takes everything at once."""
    rows, positions = torch.arange(shape[0]), torch.arange(shape[1])
    return ModuleCall((0,), 0, torch.arange(math.prod(shape)).view(*shape), rows, positions)


def list_expert_calls(exchanges: Sequence[Exchange], ids: Tensor, count: int) -> list[ModuleCall]:
    """Return the copies (token * k + choice) that each of so many experts takes in each exchange, in their order.

    `ids` (B, S, k) are the choices.
    """
    flat, k = ids.flatten(), ids.shape[-1]
    whole: Sequence[Exchange] = [(torch.arange(flat.numel() // k),)]
    found = []
    for number, exchange in enumerate(exchanges or whole):
        copies = (torch.cat(exchange).unsqueeze(1) * k + torch.arange(k)).flatten()
        for expert in range(count):
            own = copies[flat[copies] == expert]
            if len(own):
                found.append(ModuleCall((0,), number, own[None], torch.arange(1), torch.arange(len(own))))
    return found


def _join(found: Sequence[tuple[int, int, Key]], shape: Sequence[int]) -> list[ModuleCall]:
    """Return what ranks take, once where several take the same, such as those of tp."""
    ranks: dict[tuple[int, tuple[tuple[int, ...], ...]], list[int]] = {}
    for rank, number, dims in found:
        ranks.setdefault((number, tuple(map(tuple, dims))), []).append(rank)
    calls = []
    for (number, dims), those in ranks.items():
        if len(dims) != len(shape):
            return []
        indices = [torch.tensor(each) for each in dims]
        at = torch.zeros((), dtype=torch.int64)
        for size, index in zip(shape, indices, strict=True):
            at = at.unsqueeze(-1) * size + index
        calls.append(ModuleCall(tuple(sorted(set(those))), number, at, indices[0], indices[1]))
    return calls


def find_partner(calls: Sequence[ModuleCall], call: ModuleCall, way: str) -> ModuleCall | None:
    """Return the call of the same ranks in another micro-batch; None of another shape."""
    own = {each.micro_batch: each for each in calls if set(each.ranks) & set(call.ranks)}
    found = own.get(MICRO_BATCHES[way](call.micro_batch, max(own)))
    return found if found is not None and found.at.shape == call.at.shape else None
