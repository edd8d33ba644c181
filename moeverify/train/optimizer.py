"""The recipe's optimizer over this rank's parameters, and its state as logical tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moeverify.cases.schema import Optimizer as OptimizerSpec
from moeverify.parallel.regions.local_shard import LocalShard, parameters
from moeverify.parallel.regions.region import Region
from moeverify.seams import seam
from moeverify.train.optimizer_kinds import OPTIMIZER, OPTIMIZER_KERNELS


@seam
def build_optimizer(spec: OptimizerSpec, shards: Sequence[LocalShard], kernels: str) -> Optimizer:
    """Return the optimizer; weight decay applies only to parameters with two or more logical dims.

    Each group has either plain tensors or DTensors: torch's foreach kernels reject a mix.
    """
    by_kind: dict[tuple[bool, bool], list[Tensor]] = {}
    # One tensor may fuse several logical parameters.
    for shard in {id(shard.tensor): shard for shard in shards}.values():
        is_matrix = len(shard.region.shape) > 1
        by_kind.setdefault((is_matrix, isinstance(shard.tensor, DTensor)), []).append(shard.tensor)
    groups = [
        {"params": tensors, "weight_decay": spec.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), tensors in by_kind.items()
    ]
    return OPTIMIZER.find(spec.name).build(groups, spec, OPTIMIZER_KERNELS.find(kernels).keywords)


def build_model_optimizer(spec: OptimizerSpec, kernels: str, model: nn.Module) -> Optimizer:
    """Return the recipe's optimizer over this rank's parameters of a module, sharded or not."""
    return build_optimizer(spec, parameters(model), kernels)


def optimizer_state(
    optimizer: Optimizer, shards: Sequence[LocalShard]
) -> Iterator[tuple[str, Tensor, Region]]:
    """Yield (name, local values, region) for every tensor of the optimizer's state.

    A moment has its parameter's region. A step counter is a logical scalar.
    """
    for shard in shards:
        for key, value in sorted(optimizer.state.get(shard.tensor, {}).items()):
            if not isinstance(value, Tensor):
                continue
            local = shard.local(value)
            whole = local.ndim == 0 and shard.region.local_shape != ()
            yield f"{shard.name}.{key}", local, Region.whole(()) if whole else shard.region
