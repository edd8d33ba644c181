"""A logical tensor that differs from its golden: the golden values and the values on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.results.explanation import Quantity
from moeverify.train.module_taps import BACKWARD, FORWARD

Key = tuple[int, str, str]  # step, kind, name

EXACT = 1e-8
"""Largest relative residual, in float64, of a hypothesis that explains a tensor.

It is far above rounding and far below bugs. A sum of 1e6 float64 numbers in another order is off by about
1e-13 of its terms. The smallest bug of the catalogue changes a tensor by 1e-6.
"""

# Readings at module ends are tensors, too; they have one kind for each direction.
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
    """Return the quantity of a kind of logical tensor, `Quantity.TENSOR` if it is unknown."""
    if kind == Kind.GRADIENT_NORM:
        return Quantity.GRADIENT_NORM if name == "total" else Quantity.CLIP_COEFFICIENT
    return _QUANTITIES.get(kind, Quantity.TENSOR)


@dataclass(frozen=True)
class RankShard:
    """The part of a logical tensor on one rank; `local` is None if the rank should have it but does not.

    `before` is the value before a checkpoint was loaded. `local` and `before` hold the elements of
    `region`.
    """

    rank: int
    region: Region
    local: Tensor | None
    before: Tensor | None = None

    def values(self) -> Tensor:
        """Return the values in the shape of the region, float64; zeros if there are none."""
        if self.local is None:
            return torch.zeros(self.region.local_shape, dtype=torch.float64)
        return self.local.to(torch.float64).reshape(self.region.local_shape)


def _round_of(dtype: torch.dtype) -> float:
    """Return the relative error that sums of values of a dtype may have."""
    return min(2.0**10 * torch.finfo(dtype).eps, 1e-3)


@dataclass(frozen=True, eq=False)
class WrongTensor:
    """A logical tensor that differs from its golden.

    `expected` is the whole golden tensor, float64. `precision` is the dtype of the recipe, and `bound` the
    relative error that a right value may have, where it is known.
    """

    key: Key
    expected: Tensor
    shards: tuple[RankShard, ...] = ()
    precision: torch.dtype = torch.float64
    bound: float = 0.0

    @property
    def name(self) -> str:
        """Return the name of the logical tensor, or of the module that was read."""
        return self.key[2]

    @property
    def quantity(self) -> Quantity:
        """Return the quantity of the tensor in a training step."""
        return quantity_of(self.key[1], self.name)

    @property
    def exact(self) -> float:
        """Return the largest relative residual of a hypothesis that explains the tensor.

        In float64 this is `EXACT`. In float32 the parts of a sum have rounding errors, and the sum has all
        of them: 2^10 units (1.2e-4) are allowed. A comparison without measured noise allows right gradients
        the same (`moeverify.scripts.compare.limits`), so an explained tensor is as close to the golden as a right
        one may be. Clean runs had at most 31 units (FSDP2 with tensor parallelism). Coarser dtypes allow
        1e-3, which 16 bits never reach: no cause is better than a wrong one. A float64 model with parts in
        float32 rounds as much as its bound says, up to the limit of float32.
        """
        if self.precision == torch.float64:
            return max(EXACT, min(self.bound, _round_of(torch.float32)))
        return _round_of(self.precision)

    @cached_property
    def whole(self) -> Tensor:
        """Return the whole tensor, float64. If replicas differ, use the one farthest from the golden.

        A finding quotes the worst rank, so statements about the tensor must hold for this rank.
        """
        whole = torch.zeros_like(self.expected)
        for shard in sorted(self.shards, key=lambda shard: (self.error_of(shard), -shard.rank)):
            if shard.local is not None and shard.region.numel:
                shard.region.put(whole, shard.values())
        return whole

    def expected_of(self, shard: RankShard) -> Tensor:
        """Return the golden values in the region of a shard."""
        return shard.region.take(self.expected).reshape(shard.region.local_shape)

    def error_of(self, shard: RankShard) -> float:
        """Return the distance of a shard from the golden: the norm of the difference, infinity for NaN."""
        error = float((shard.values() - self.expected_of(shard)).norm())
        return error if error < float("inf") else float("inf")  # NaN compares false

    @property
    def worst_shard(self) -> RankShard:
        """Return the shard farthest from the golden; the lowest rank if several are."""
        return max(self.shards, key=lambda shard: (self.error_of(shard), -shard.rank))

    def differs(self) -> bool:
        """Return whether any shard is missing, has another size, or differs by more than float64 rounding."""
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
    """Return the distances of the tensor and its golden from another value, relative to its norm."""
    wanted = value.to("cpu", torch.float64).reshape(tensor.expected.shape)
    norm = max(float(wanted.norm()), 1e-300)
    return float((tensor.whole - wanted).norm()) / norm, float((tensor.expected - wanted).norm()) / norm
