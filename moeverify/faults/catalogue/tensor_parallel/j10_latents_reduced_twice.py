"""Gradients of replicated latent projections are summed over tp although a part is already complete."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Sum the gradient of kv_a_proj over tp: rows of the latent are complete, rotary ones partial."""
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.mla import LatentAttention
    from moeverify.model.param_access import identity
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.tensor import apply_tensor_parallel, partial_parameters

    @patch.wrap(apply_tensor_parallel)
    def share_without_sum(
        original: Original[None], model: Transformer, mesh: DeviceMesh, **named: bool
    ) -> None:
        original(model, mesh, **named)
        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.share = identity

    @patch.wrap(partial_parameters)
    def add_latents(
        original: Original[list[Tensor]], model: Transformer, *, sequence_parallel: bool
    ) -> list[Tensor]:
        found = original(model, sequence_parallel=sequence_parallel)
        heads = [module for module in model.modules() if isinstance(module, LatentAttention)]
        return [*found, *(module.kv_a_proj.weight for module in heads)]


FAULT = Fault(
    number="J10",
    title="the gradients of latent projections are reduced over tp twice",
    source="inclusionAI/AReno PR #496",
    mechanism=(
        "the gradient of a replicated projection and that of its input are both summed, though a part of "
        "it is complete"
    ),
    trigger="tp with latent attention, no sequence parallelism",
    case=make_case("j10", preset="tiny-deepseek-v2-lite", tp=2, sequence_parallel=False),
    expected=Expected(
        where=(
            At(name="*kv_a_proj*"),
            At(axis="tp"),
            At(name="*.attention"),
        ),
        causes=(
            Cause.MISSING_REDUCTION,
            Cause.SCALE,
        ),
    ),
    inject=inject,
)
