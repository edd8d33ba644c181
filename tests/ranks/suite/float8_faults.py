"""Bugs of layers in float8, for `--fault float8_faults:NAME`: called before the layout is built.

Some affect the scales of operands, others FSDP2's sums of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from moeverify.faults.patch import Original, Patch
from moeverify.model.float8 import list_layers
from moeverify.parallel import float8


def keep_to_own_part(patch: Patch) -> None:
    """Scale a tensor sharded over tp by the largest element of the rank's own part."""
    from torchao.float8.float8_utils import tensor_to_amax

    @patch.wrap(tensor_to_amax)
    def find(original: Original[torch.Tensor], x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return original(x, *rest, **named)
        own = original(x.to_local(), *rest, **named)
        return DTensor.from_local(own, x.device_mesh, [Replicate()], run_check=False)


def use_last_step(patch: Patch) -> None:
    """Scale every operand by its scale of the previous step, as delayed scaling does."""
    kept: dict[Any, torch.Tensor] = {}

    def choose(key: Any, scale: torch.Tensor) -> torch.Tensor:
        before = kept.get(key, scale)
        kept[key] = scale
        return before

    _replace_scales(patch, choose)


def use_layer_before(patch: Patch) -> None:
    """Scale every weight by the scale of the weight that was rounded before it."""
    last: list[torch.Tensor] = []

    def choose(key: Any, scale: torch.Tensor) -> torch.Tensor:
        if key[1].value != "weight":
            return scale
        last.append(scale)
        return last[-2] if len(last) > 1 else scale

    _replace_scales(patch, choose)


def forget_feed_forward(patch: Patch) -> None:
    """Leave dense feed-forward layers out of float8."""

    @patch.wrap(list_layers, used_by=float8)
    def choose(original: Original[Any], model: nn.Module) -> Any:
        return [found for found in original(model) if ".mlp." not in found[0]]


def lose_a_part(patch: Patch) -> None:
    """Let rank 1 contribute less than its part of one small gradient in a joint reduce-scatter of FSDP2."""
    _change_buckets(patch, lambda name: 0.7 if name.endswith("0.attention.k_norm.weight") else 1.0)


def lose_a_rank(patch: Patch) -> None:
    """Let rank 1 contribute nothing to the gradients that FSDP2 scatters."""
    _change_buckets(patch, lambda name: 0.0)


def _change_buckets(patch: Patch, factor_of: Callable[[str], float]) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as users
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce

    def change(
        original: Original[Any], fsdp_params: Any, unsharded_grads: Any, *rest: Any, **named: Any
    ) -> Any:
        if torch.distributed.get_rank() == 1:
            for parameter, gradient in zip(fsdp_params, unsharded_grads, strict=True):
                gradient.mul_(factor_of(parameter._param_fqn))
        return original(fsdp_params, unsharded_grads, *rest, **named)

    patch.wrap(foreach_reduce, used_by=users)(change)


def _replace_scales(patch: Patch, choose: Any) -> None:
    from torchao.float8 import float8_scaling_utils as library
    from torchao.float8.float8_utils import tensor_to_scale

    @patch.wrap(library.hp_tensor_to_float8_dynamic)
    def scale(original: Original[Any], hp_tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        dtype, options = rest[:2]
        role, dim = named["gemm_input_role"], named.get("axiswise_dim")
        now = tensor_to_scale(
            hp_tensor,
            dtype,
            scaling_granularity=named["scaling_granularity"],
            axiswise_dim=dim,
            round_scales_to_power_of_2=named["round_scales_to_power_of_2"],
        )
        used = choose((id(options), role, dim), now)
        return library.hp_tensor_and_scale_to_float8(hp_tensor, used, dtype, options, role, dim)
