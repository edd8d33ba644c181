"""The fused kernels of torch: memory grows with the length of a row, not with its square."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moeverify.cases.rule import blame, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.model.attention_cores import AttentionKind

if TYPE_CHECKING:
    from torch import Tensor

    from moeverify.model.attention import Core


@reading("layout.attention", "layout.cp", "layout.parallelize")
def whole_rows(case: Case) -> Iterator[Problem]:
    """Reject split rows: the fused kernel ignores positions and assumes a whole row in order."""
    if case.layout.cp > 1 or case.layout.parallelize is not None:
        message = "fused attention is for whole rows, without cp or a function of your own"
        yield blame("layout.attention", message, "write `plain`, or remove it")


def fused_core(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Return `causal_core` by torch's fused kernels, for tokens in the order of their positions.

    Shapes: q (B, S, Nq, D), k (B, S, Nkv, D), v (B, S, Nkv, Dv), positions (B, S).
    Returns: (B, S, Nq, Dv).
    """
    from torch.nn import functional

    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
    return mixed.transpose(1, 2)


class _Fused(AttentionKind):
    rules = (whole_rows,)

    def make_core(self) -> Core:
        return fused_core


IMPLEMENTATION = _Fused()
