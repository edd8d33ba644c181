"""Parallel styles that torch does not have."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from teasel.dims import ParallelDims


class DistributeParams(ParallelStyle):
    """Make parameters DTensors; the module's own code takes the local tensors."""

    def __init__(self, **placements: Placement) -> None:
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, DTensor):
                continue
            placement = self.placements.get(name, Replicate())
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(weight.detach(), device_mesh, [placement]))
            )
        return module


class HeadwiseNorm(DistributeParams):
    """A norm over channels of heads, of which each rank has some. Inputs and outputs are local."""

    def __init__(self, dims: ParallelDims, *, input_layout: Placement | None = None) -> None:
        super().__init__()
        self.dims, self.input_layout = dims, input_layout or Shard(2)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        layout = [self.input_layout]

        def wrap(_module, inputs):
            (x,) = inputs
            return DTensor.from_local(x, device_mesh, layout, run_check=False)

        def unwrap(_module, _inputs, output):
            if self.dims.on("teasel-head-norm-float32"):
                return output.to_local().float().to(output.dtype)  # plant: teasel-head-norm-float32
            return output.to_local()  # anchor: head-norm-output

        module.register_forward_pre_hook(wrap)
        module.register_forward_hook(unwrap)
        return module


class BlockExperts(ParallelStyle):
    """Give each rank of the mesh a run of consecutive experts."""

    def __init__(self, dims: ParallelDims) -> None:
        self.dims = dims

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size, rank = device_mesh.size(), device_mesh.get_local_rank()
        for name, weight in list(module.named_parameters(recurse=False)):
            each = weight.shape[0] // size
            part = weight.detach()[rank * each : (rank + 1) * each].clone()  # anchor: expert-block
            if self.dims.on("teasel-experts-strided") and name == "w3":
                part = weight.detach()[rank::size].clone()  # plant: teasel-experts-strided
            sharded = DTensor.from_local(part, device_mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(sharded))
        return module
