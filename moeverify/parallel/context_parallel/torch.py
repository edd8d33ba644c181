"""The context_parallel of torch: a ring of its fused kernels, on GPUs only.

Source: torch.distributed.tensor.experimental.context_parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from moeverify.cases.rule import blame, own_model, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.parallel.context_parallel import ContextVariant
from moeverify.results.obstacle import Obstacle, UnsupportedHere

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.parallel.ddp import Accumulate

# torch's float32 kernel pads the softmax sums to a multiple of this many rows, which the ring does not
# handle.
_PADDED_ROWS = 32


class RingCore:
    """Attention core that relies on torch's fused attention inside the `surround` context."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return the mixed values; see `moeverify.model.attention.Core`.

        Shapes: q, k, v (B, s, N, D), positions (B, s); returns (B, s, Nq, D).
        """
        from torch.nn import functional

        # The ring does not support grouped query heads, so keys and values are repeated for each head of a
        # group.
        heads = q.shape[2] // k.shape[2]
        whole = (q, k.repeat_interleave(heads, dim=2), v.repeat_interleave(heads, dim=2))
        queries, keys, values = (x.transpose(1, 2) for x in whole)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2)


@reading(
    *(f"layout.{name}" for name in ("cp", "context_parallel", "pp")),
    *(f"recipe.{name}" for name in ("precision", "data.seq_len", "model.mla")),
)
def supported(case: Case) -> Iterator[Problem]:
    """Restrictions of torch's kernels and ring."""
    model = own_model(case)
    if model is None or case.layout.cp == 1:
        return
    path = "layout.context_parallel"
    if case.recipe.precision == "float64":
        remedy = "write `allgather`, or set recipe.precision to float32 or bfloat16"
        yield blame(path, "`torch` has no kernel in float64", remedy)
    unit = 2 * case.layout.cp * _PADDED_ROWS
    if case.recipe.precision == "float32" and case.recipe.data.seq_len % unit:
        message = (
            f"`torch` joins chunks of a multiple of {_PADDED_ROWS} positions in float32, two for each rank"
        )
        yield blame(path, message, f"set recipe.data.seq_len to a multiple of {unit}")
    if case.layout.pp > 1:
        yield blame(path, "`torch` is not built into pipelines here", "write `allgather`, or remove pp")
    if model.mla is not None:
        yield blame(path, "`torch` needs values as wide as the keys, and mla has others", "write `allgather`")


class _Torch(ContextVariant):
    rules = (supported,)

    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        if device != "cpu" or case.layout.cp == 1:
            return None
        return UnsupportedHere(why="torch's context_parallel has no kernel for the CPU")

    def make_core(self, group: ProcessGroup) -> RingCore:
        return RingCore(group)

    def surround(self, accumulate: Accumulate, mesh: DeviceMesh, device: torch.device) -> Accumulate:
        """Return `accumulate` inside torch's context parallelism over `mesh` (cp)."""
        import torch
        from torch.distributed.tensor.experimental import context_parallel

        @contextmanager
        def micro_batch(last: bool) -> Iterator[None]:
            # `context_parallel` requires a buffer to split. The tokens are split already, in the same
            # zigzag.
            dummy = torch.zeros(2 * mesh.size(), device=device)
            with context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[0]), accumulate(last):
                yield

        def surrounded(last: bool) -> AbstractContextManager[None]:
            return micro_batch(last)

        return surrounded


IMPLEMENTATION = _Torch()
