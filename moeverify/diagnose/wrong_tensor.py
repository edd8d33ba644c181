"""A logical tensor that differs from its golden: the golden's values, and what every rank has of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moeverify.layout.region import Region
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.train.module_taps import BACKWARD, FORWARD

Key = tuple[int, str, str]  # step, kind, name

EXACT = 1e-8
"""Relative residual under which, in float64, a hypothesis explains a tensor: far above rounding, far below bugs.

A sum of 1e6 float64 numbers in another order is off by about 1e-13 of its terms; the smallest bug of the catalogue
changes a tensor by 1e-6."""

# Readings of a module's ends are tensors too; their kinds are those of the two directions.
MODULE_KINDS = {FORWARD: "module output", BACKWARD: "module gradient"}

_QUANTITIES: Mapping[str, Quantity] = {
    "initial_weight": Quantity.INITIAL_VALUE,
    "initial_buffer": Quantity.INITIAL_VALUE,
    MODULE_KINDS[FORWARD]: Quantity.OUTPUT,
    "router_ids": Quantity.EXPERT_CHOICE,
    "router_flips": Quantity.EXPERT_CHOICE,
    "router_weights": Quantity.ROUTING_WEIGHT,
    "router_counts": Quantity.ROUTING_COUNT,
    "token_loss": Quantity.LOSS,
    "loss": Quantity.LOSS,
    "gradient": Quantity.GRADIENT,
    MODULE_KINDS[BACKWARD]: Quantity.MODULE_GRADIENT,
    "update": Quantity.UPDATE,
    "weight": Quantity.UPDATE,
    "optimizer_state": Quantity.OPTIMIZER_STATE,
    "buffer": Quantity.BUFFER,
    "loaded": Quantity.LOADED,
}


def quantity_of(kind: str, name: str) -> Quantity:
    """Return what a kind of logical tensor is in a training step."""
    if kind == Kind.GRADIENT_NORM:
        return Quantity.GRADIENT_NORM if name == "total" else Quantity.CLIP_COEFFICIENT
    return _QUANTITIES.get(kind, Quantity.TENSOR)


@dataclass(frozen=True)
class RankShard:
    """What one rank has of a logical tensor; `local` is None where it has none although it should.

    `before` is what it had before a checkpoint was loaded. Shapes: `local` and `before` hold `region`.
    """

    rank: int
    region: Region
    local: Tensor | None
    before: Tensor | None = None

    def values(self) -> Tensor:
        """Return the values, zeros where there are none. Shape: that of the region; float64."""
        if self.local is None:
            return torch.zeros(self.region.local_shape, dtype=torch.float64)
        return self.local.to(torch.float64).reshape(self.region.local_shape)


@dataclass(frozen=True, eq=False)
class WrongTensor:
    """A logical tensor that differs from its golden.

    `expected` is the whole golden, in float64; `precision` the dtype that the recipe asks for.
    """

    key: Key
    expected: Tensor
    shards: tuple[RankShard, ...] = ()
    precision: torch.dtype = torch.float64

    @property
    def name(self) -> str:
        """Return the name of the logical tensor, or of the module that was read."""
        return self.key[2]

    @property
    def quantity(self) -> Quantity:
        """Return what it is in a training step."""
        return quantity_of(self.key[1], self.name)

    @property
    def exact(self) -> float:
        """Return the relative residual under which a hypothesis explains the tensor: `EXACT`, or rounding.

        Below float64 the parts of a sum are each off by their own rounding, and the sum by that of all of them: 2^10
        units, 1.2e-4 in float32, are what a comparison without measured noise allows a right gradient too
        (`moeverify.captured.limits`). So what is explained is as near to the golden as a right tensor may be. Clean
        runs had at most 31 units (FSDP2 with tensor parallelism). Coarser dtypes explain no more than 1e-3, which
        16 bits never reach: no cause is better than a wrong one.
        """
        if self.precision == torch.float64:
            return EXACT
        return min(2.0**10 * torch.finfo(self.precision).eps, 1e-3)

    @cached_property
    def whole(self) -> Tensor:
        """Return the whole tensor, float64; where replicas differ, the one furthest from the golden.

        A finding quotes the rank that is worst, and what is said of the tensor must be true of that rank.
        """
        whole = torch.zeros_like(self.expected)
        for shard in sorted(self.shards, key=lambda shard: (self.error_of(shard), -shard.rank)):
            if shard.local is not None and shard.region.numel:
                shard.region.put(whole, shard.values())
        return whole

    def expected_of(self, shard: RankShard) -> Tensor:
        """Return what the golden has in the region of a shard."""
        return shard.region.take(self.expected).reshape(shard.region.local_shape)

    def error_of(self, shard: RankShard) -> float:
        """Return how far a shard is from the golden: the norm of the difference, infinite where one is not finite."""
        error = float((shard.values() - self.expected_of(shard)).norm())
        return error if error < float("inf") else float("inf")  # not a number is not less than anything

    @property
    def worst_shard(self) -> RankShard:
        """Return the shard that is furthest from the golden, of the lowest rank where several are."""
        return max(self.shards, key=lambda shard: (self.error_of(shard), -shard.rank))

    def differs(self) -> bool:
        """Return whether any shard is further from the golden than float64's rounding."""
        bound = 1e-11 * float(self.expected.norm())
        for shard in self.shards:
            if shard.local is None or shard.local.numel() != shard.region.numel:
                return True
            if not self.error_of(shard) <= bound:
                return True
        return False

    def by_region(self) -> dict[str, list[RankShard]]:
        """Return the replicas of each region."""
        groups: dict[str, list[RankShard]] = {}
        for shard in self.shards:
            if shard.region.numel:
                groups.setdefault(shard.region.key, []).append(shard)
        return groups


def measure_distance(tensor: WrongTensor, value: Tensor) -> tuple[float, float]:
    """Return how far the tensor, and how far its golden, is from another value, as shares of that value's norm."""
    wanted = value.to("cpu", torch.float64).reshape(tensor.expected.shape)
    norm = max(float(wanted.norm()), 1e-300)
    return float((tensor.whole - wanted).norm()) / norm, float((tensor.expected - wanted).norm()) / norm
