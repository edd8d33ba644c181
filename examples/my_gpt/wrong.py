"""The same model parallelized with a mistake, which moeverify finds: see docs/verify-your-own-model.md."""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from my_gpt.model import GPT, apply_fsdp


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard the heads over `tp`, and omit the gradient sum of norms that see only one rank's heads."""
    tp = mesh["tp"]
    for layer in model.h:
        plan = {
            "attn.query": ColwiseParallel(),
            "attn.key": ColwiseParallel(),
            "attn.value": ColwiseParallel(),
            "attn.out": RowwiseParallel(),
            "expand": ColwiseParallel(),
            "shrink": RowwiseParallel(),
        }
        parallelize_module(layer, tp, plan)
    parallelize_module(model.wte, tp, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model.head, tp, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    apply_fsdp(model, mesh)
    return model
