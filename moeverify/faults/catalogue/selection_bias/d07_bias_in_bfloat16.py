"""Recomputation renames the selection bias, which is then taken for a weight and cast to bfloat16."""

from __future__ import annotations

from moeverify.cases.schema import Recompute
from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Cast the selection bias of every router inside a recomputed block to bfloat16."""
    import torch

    from moeverify.model.router import Router
    from moeverify.model.transformer import Transformer
    from moeverify.parallel.recompute import apply_recompute

    @patch.wrap(apply_recompute)
    def cast_buffers(original: Original[None], model: Transformer, which: Recompute) -> None:
        original(model, which)
        for name, module in model.named_modules():
            is_renamed = "_checkpoint_wrapped_module" in name
            if is_renamed and isinstance(module, Router) and module.selection_bias is not None:
                module.selection_bias = module.selection_bias.to(torch.bfloat16)


FAULT = Fault(
    number="D07",
    title="the selection bias is silently kept in bfloat16",
    source="pytorch/torchtitan PR #3861 (828ab9c61); NVIDIA/Megatron-LM !2895",
    mechanism="names do not match under the checkpoint wrapper, so the cast of weights takes the buffer too",
    trigger="recomputation in mixed precision",
    case=make_case("d07", dp_shard=2, recompute=True, recipe={"precision": "float32"}),
    expected=Expected(where=(At(name="*.selection_bias"),), causes=(Cause.ROUNDING,)),
    inject=inject,
    precisions=("float64", "float32"),
    notes="in a float32 recipe: in bfloat16 the bound of a buffer is the rounding of bfloat16 and hides it",
)
