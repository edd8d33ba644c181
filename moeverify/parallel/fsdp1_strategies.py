"""FSDP1 sharding strategies, by the names of torch."""

from __future__ import annotations

from dataclasses import dataclass

from moeverify.cases.choice import Row, Table


@dataclass(frozen=True, kw_only=True)
class Strategy(Row):
    """An FSDP1 strategy: members of torch's ShardingStrategy.

    `shards` is for a mesh of (fsdp), `hybrid` for (dp_replicate, fsdp).
    """

    shards: str
    hybrid: str


FSDP1_STRATEGY: Table[Strategy] = Table(
    path="layout.fsdp1_strategy",
    home=__name__,
    rows={
        "full_shard": Strategy(
            meaning="Parameters, gradients and optimizer state: parameters are gathered for each pass.",
            shards="FULL_SHARD",
            hybrid="HYBRID_SHARD",
        ),
        "shard_grad_op": Strategy(
            meaning="Gradients and optimizer state: parameters stay gathered from forward to backward.",
            shards="SHARD_GRAD_OP",
            hybrid="_HYBRID_SHARD_ZERO2",
        ),
    },
)
