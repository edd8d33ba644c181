"""The gather of the logits sums their gradient over tp although all ranks compute the same loss."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Sum the gradient of the whole logits over tp."""
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.transformer import Transformer
    from moeverify.parallel.collectives import copy_to
    from moeverify.parallel.tensor import apply_tensor_parallel

    @patch.wrap(apply_tensor_parallel)
    def sum_logit_gradients(
        original: Original[None],
        model: Transformer,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool,
        loss_parallel: bool,
    ) -> None:
        original(model, mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)

        def use_as_different(_: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            return copy_to(logits, mesh.get_group())

        assert model.lm_head is not None
        model.lm_head.register_forward_hook(use_as_different)


FAULT = Fault(
    number="J12",
    title="the gradient of gathered logits is all-reduced once too often",
    source="pytorch/torchtitan PR #3822 (5aefc0229)",
    mechanism="the all-gather is typed as a value that each rank uses in its own way, so its backward sums over tp",
    trigger="tp with a loss on gathered logits",
    case=make_case("j12", preset="tiny-gpt", tp=2),
    expected=Expected(where=(At(axis="tp"), At(name="lm_head*")), causes=(Cause.SCALE,)),
    inject=inject,
    is_moe=False,
)
