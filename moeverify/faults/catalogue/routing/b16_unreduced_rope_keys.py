"""The part of the keys that all heads share gets the gradient of one rank's heads only."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Expand the shared part of the keys to the local heads without summing its gradient over tp."""
    from torch.distributed.device_mesh import DeviceMesh

    from moeverify.model.mla import LatentAttention
    from moeverify.model.param_access import identity
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.tensor import apply_tensor_parallel

    @patch.wrap(apply_tensor_parallel)
    def share_without_sum(
        original: Original[None], model: Transformer, mesh: DeviceMesh, **named: bool
    ) -> None:
        original(model, mesh, **named)
        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.share = identity


FAULT = Fault(
    number="B16",
    title="the rotary part of latent keys is not reduced over tp",
    source="NVIDIA/Megatron-LM issue #1699, PR #6839; pytorch/torchtitan PR #1373",
    mechanism=(
        "a replicated single-head key is expanded onto local heads, and each rank keeps the gradient of "
        "its own heads"
    ),
    trigger="tp with latent attention",
    case=make_case("b16", preset="tiny-deepseek-v2-lite", tp=2),
    expected=Expected(
        where=(
            At(name="*.attention*"),
            At(axis="tp"),
        ),
        causes=(Cause.MISSING_REDUCTION,),
    ),
    inject=inject,
)
