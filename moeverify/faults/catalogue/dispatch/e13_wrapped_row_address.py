"""The address of a routed row overflows, so rows beyond the limit are read from the buffer's start."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause

ADDRESSES = 2**12
"""Address range in elements: 2^31 in the real kernels, scaled down with the model."""


def inject(patch: Patch) -> None:
    """Compute the address of every row of the experts' outputs modulo the limit in the combine."""
    from torch import Tensor

    from moeverify.model.dispatcher import invert, unpermute

    @patch.wrap(unpermute)
    def wrap_addresses(original: Original[Tensor], y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        hidden = y.shape[-1]
        rows = invert(order) * hidden % ADDRESSES // hidden
        # The rows are now ordered by token and choice, so the original must not permute them.
        return original(y.index_select(0, rows), order.sort().values, weights)


FAULT = Fault(
    number="E13",
    title="row addresses of the combine kernel overflow",
    source="pytorch/torchtitan PR #3969 (b3a13eed9)",
    mechanism="row times stride is computed in too few bits, so large buffers are read at wrapped addresses",
    trigger="EP, many routed rows",
    case=make_case("e13", dp_shard=2, ep=2),
    expected=Expected(where=(At(name="*.moe*"),), causes=(Cause.FORWARD,)),
    inject=inject,
    notes="the width of an address is scaled down from 31 to 12 bits; a wrapped address is taken modulo the limit",
)
