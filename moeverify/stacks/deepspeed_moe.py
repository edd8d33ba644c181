"""DeepSpeed's experts (`deepspeed.moe.layer.MoE`): a whole model, and the same model with expert parallelism.

The factory of the user takes `ep_size` and passes it to its MoE layers, as in training code. The whole
model is created with `ep_size` 1. Under a layout the factory is called again, and each rank copies its part
by global expert index.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.framework import import_framework, number_globally
from moeverify.train.target import resolve
from moeverify.verification.launch.single_rank_world import single_rank_world

# The first release with `top2_2nd_expert_sampling`, without which the second expert is drawn at random.
LEAST = "0.17.0"
_EXPERTS = "deepspeed_experts"


def make(factory: str, *, spread: float = 0.1, **arguments: Any) -> nn.Module:
    """Return the model of `factory(ep_size=1, **arguments)`, with distinct values in every expert.

    DeepSpeed initializes all experts as copies of one, which would hide a permutation. Each expert gets
    random offsets of scale `spread`, and so do constant tensors such as norm weights and biases.
    """
    import_framework("deepspeed", least=LEAST, path="recipe.model.factory")
    make_model = resolve(factory, "recipe.model.arguments.factory")
    with single_rank_world(torch.device("cpu")):
        model: nn.Module = make_model(ep_size=1, **arguments)
        join_one_rank(model)
    offset_constants(model.parameters(), spread)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{_EXPERTS}." in name:
                parameter.add_(spread * torch.randn_like(parameter))
    model.made_of = (make_model, arguments)  # type: ignore[assignment]  # for `build_again`
    return model


def leave_reductions_to_gloo() -> None:
    """Disable DeepSpeed's shared-memory operator, which the first all-reduce would compile for minutes."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join_one_rank(model: nn.Module) -> None:
    """Set the single-rank group as the expert-parallel group of all MoE layers."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    leave_reductions_to_gloo()
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    for module in model.modules():
        if isinstance(module, MoE):
            module.deepspeed_moe._set_ep_group(dist.group.WORLD)


@torch.no_grad()
def build_again(whole: nn.Module, ep_size: int) -> nn.Module:
    """Return a model with its experts divided over `ep_size` ranks and with the values of `whole`.

    Raises: CaseError when `make` did not create the model.
    """
    made_of = getattr(whole, "made_of", None)
    if made_of is None:
        message = f"{type(whole).__name__} was not made by moeverify.stacks.deepspeed_moe"
        remedy = "make it by `recipe.model.factory: moeverify.stacks.deepspeed_moe:make`, or remove ep_size"
        raise CaseError([Problem(message, path="layout.arguments.ep_size", remedy=remedy)])
    make_model, arguments = made_of
    divided: nn.Module = make_model(ep_size=ep_size, **arguments)
    values = dict(whole.named_parameters())
    # DeepSpeed's expert-parallel groups consist of consecutive ranks
    # (`groups._create_expert_and_data_parallel`).
    rank = dist.get_rank() % ep_size
    num_local = {
        name: module.num_local_experts
        for name, module in divided.named_modules()
        if hasattr(module, _EXPERTS)
    }
    for name, parameter in divided.named_parameters():
        layer = next((each for each in num_local if name.startswith(f"{each}.")), None)
        first = rank * num_local[layer] if layer is not None else 0
        parameter.copy_(values[number_globally(name, _EXPERTS, first)])
    return divided


def split_groups(optimizer: Optimizer) -> None:
    """Move experts to their own parameter groups, which DeepSpeed requires for their data-parallel groups."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    named = [{**group, "name": f"group {number}"} for number, group in enumerate(optimizer.param_groups)]
    groups = split_params_into_different_moe_groups_for_optimizer(named)
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
