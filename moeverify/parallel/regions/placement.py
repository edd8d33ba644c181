"""The region of the logical tensor that a rank stores, from a DTensor's placements.

Indices are derived here from the mesh coordinate and the definition of each placement. `full_tensor()` and
torch's offset arithmetic are not used, because they are part of the verified code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from moeverify.parallel.regions.region import Indices, Region


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or the tensor itself."""
    if isinstance(tensor, DTensor):
        # to_local() would add a node to the autograd graph. A functional collective returns an async
        # tensor.
        local = tensor._local_tensor
        return local.wait() if hasattr(local, "wait") else local
    return tensor


def is_partial(tensor: Tensor) -> bool:
    """Return whether a tensor is an unreduced partial sum, so that other ranks hold the rest of it."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def is_placed_alike(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape, such as a parameter and its gradient, have equal placements."""
    return getattr(tensor, "placements", None) == getattr(other, "placements", None)


def region_of(tensor: Tensor) -> Region:
    """Return the region of the logical tensor that this rank stores; a plain tensor is whole."""
    if not isinstance(tensor, DTensor):
        return Region.whole(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Region.box(tensor.shape, [range(0)] * tensor.ndim)
    return shard_region(tuple(tensor.shape), tuple(mesh.shape), coordinate, tensor.placements)


def shard_region(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Region:
    """Return the region that the rank at `coordinate` stores of a tensor with the given placements.

    Each sharded dim is split like `torch.chunk`: ceil(size / parts) per part, with the last parts shorter
    or empty. Mesh axes that shard the same dim split it one after the other, in the order of
    `sharding_order`.
    """
    dims: list[Indices] = [range(size) for size in shape]
    for axis, dim, num_blocks in sharding_order(mesh_shape, placements, len(shape)):
        blocks = [_chunk(dims[dim], num_blocks, number) for number in range(num_blocks)]
        parts = [_chunk(block, mesh_shape[axis], coordinate[axis]) for block in blocks]
        dims[dim] = parts[0] if num_blocks == 1 else tuple(chain.from_iterable(parts))
    return Region.box(shape, dims)


def _chunk(indices: Indices, num_parts: int, number: int) -> Indices:
    """Return one part of the indices, split like torch.chunk."""
    step = -(-len(indices) // num_parts)  # rounded up: the last parts may be empty
    return indices[min(step * number, len(indices)) : min(step * (number + 1), len(indices))]


def sharding_order(
    mesh_shape: Sequence[int], placements: Sequence[Placement], num_dims: int
) -> list[tuple[int, int, int]]:
    """Return (mesh axis, tensor dim, number of blocks) in the order in which dims are split.

    A plain `Shard` is split after the shards of earlier mesh axes. A strided shard with `split_factor` f is
    split within each of f blocks:

    - Blocks that are the shards of later axes on the same dim come from FSDP2 on an already sharded tensor.
      The axis is then split after those axes, which gives the same result for uneven sizes too.
    - The remaining factor is the number of blocks of the tensor itself. In a packed projection such as gate
      and up (2 * hidden, n), each rank has a part of the gate and a part of the up projection.
    """
    # From last axis to first: insert each before the later ones, or after as many as its factor covers.
    order: list[tuple[int, int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        dim = placement.dim % num_dims
        behind = int(getattr(placement, "split_factor", 1))
        position = 0
        for number, (later_axis, later_dim, _) in enumerate(order):
            size = mesh_shape[later_axis]
            if behind == 1 or (later_dim == dim and behind % size):
                break  # the next axis did not create these blocks
            behind //= size if later_dim == dim else 1
            position = number + 1
        order.insert(position, (axis, dim, behind))
    return order
