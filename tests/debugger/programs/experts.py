"""Four gloo ranks on a 2x2 mesh. Tensors agree, differ in one element, in shape, or in placement."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from multiprocessing_pdb import MultiprocessingPdb

Tra = MultiprocessingPdb().set_trace


def step(mesh):
    rank = dist.get_rank()
    torch.manual_seed(0)
    same = torch.randn(300, 7)
    other = same.clone()
    if rank == 3:
        other[123, 4] = 9.5
    strided = other.t()
    odd_shape = torch.zeros(4 if rank == 2 else 3)
    nested = {"logits": other, "name": "x"}
    replicated = rank % 2 == 0
    piece = same if replicated else same[:150]
    placement = Replicate() if replicated else Shard(0)
    placed = DTensor.from_local(piece, mesh["tp"], [placement], run_check=False)  # no communication
    half = same.bfloat16()
    integers = torch.arange(5) + (rank == 1)
    Tra(header="experts")
    return other, strided, odd_shape, nested, placed, half, integers


if __name__ == "__main__":
    dist.init_process_group("gloo")
    step(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    dist.destroy_process_group()
