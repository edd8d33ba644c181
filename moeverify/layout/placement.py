"""From a DTensor's placements to the region of the logical tensor that a rank stores.

The indices are derived here, from the mesh coordinate and the meaning of each placement, and not from
`full_tensor()` or torch's own offset arithmetic: those are part of what is verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from moeverify.layout.region import Region


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank stores of a tensor: the local tensor of a DTensor, else the tensor itself."""
    if isinstance(tensor, DTensor):
        # to_local() would add a node to the autograd graph. A functional collective gives a tensor to wait for.
        local = tensor._local_tensor
        return local.wait() if hasattr(local, "wait") else local
    return tensor


def is_partial(tensor: Tensor) -> bool:
    """Return whether this is an unreduced partial sum: other ranks have the rest of it."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def region_of(tensor: Tensor) -> Region:
    """Return the region of the logical tensor that this rank stores; the whole one for a plain tensor."""
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

    Each sharded dim is split as `torch.chunk` splits: ceil(size / parts) a part, the last ones shorter or
    empty. Mesh axes that shard one dim split it one after the other, in the order of `sharding_order`.
    """
    dims = [range(size) for size in shape]
    for axis, dim in sharding_order(mesh_shape, placements, len(shape)):
        whole = dims[dim]
        step = -(
            -len(whole) // mesh_shape[axis]
        )  # rounded up, as torch.chunk does: the last shards may be empty
        start = min(whole.start + step * coordinate[axis], whole.stop)
        dims[dim] = range(start, min(start + step, whole.stop))
    return Region.box(shape, dims)


def sharding_order(
    mesh_shape: Sequence[int], placements: Sequence[Placement], num_dims: int
) -> list[tuple[int, int]]:
    """Return (mesh axis, tensor dim) in the order in which the shards are cut.

    A plain `Shard` is cut after the shards of the axes before it. A strided shard (what FSDP2 makes of a
    tensor that is already sharded on the same dim by a later axis) with `split_factor` f is cut after the
    following axes whose sizes multiply to f.
    """
    # From the last axis to the first: each is put before the later ones, or behind as many as its factor says.
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        dim = placement.dim % num_dims
        behind = getattr(placement, "split_factor", 1)
        position = 0
        while behind > 1 and position < len(order):
            later_axis, later_dim = order[position]
            if later_dim == dim:
                behind //= mesh_shape[later_axis]
            position += 1
        order.insert(position, (axis, dim))
    return order
