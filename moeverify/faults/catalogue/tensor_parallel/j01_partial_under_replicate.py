"""The gradient of the head's input is partial but labeled as replicated."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Multiply plain local tensors in the head, so that its input's gradient counts as replicated."""
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Shard
    from torch.nn import functional

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.tensor import apply_tensor_parallel

    @patch.wrap(apply_tensor_parallel)
    def use_plain_head(original: Original[None], model: Transformer, mesh: DeviceMesh, **named: bool) -> None:
        original(model, mesh, **named)
        head = model.lm_head
        assert head is not None

        def multiply(x: DTensor) -> Tensor:
            assert isinstance(head.weight, DTensor)
            logits = functional.linear(x.to_local(), head.weight.to_local())
            return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False)

        head.forward = multiply


FAULT = Fault(
    number="J01",
    title="the gradient of the head's input is not reduced over tp",
    source="pytorch/torchtitan PR #3412 (c2a3771a4)",
    mechanism="the partial gradient of a chunk of the loss is stored under the label of a replica",
    trigger="tp with a loss on sharded logits",
    case=make_case("j01", preset="tiny-gpt", tp=2, loss_parallel=True),
    expected=Expected(where=(At(axis="tp"),), causes=(Cause.MISSING_REDUCTION,)),
    inject=inject,
    is_moe=False,
)
