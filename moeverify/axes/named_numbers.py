"""Named numbers of a run that are not axes: model sizes and recipe options. No torch."""

from __future__ import annotations

from moeverify.axes.groups import BRANCHES, LAYERS
from moeverify.case.schema import Case

INIT_STD = "init_std"
LAYER = "place of its layer, from 1 on"


def list_sizes(case: Case) -> dict[str, float]:
    """Return the sizes of the reference model; empty for a user's own model."""
    model = case.recipe.model.reference
    if model is None:
        return {}
    sizes: dict[str, float] = {
        BRANCHES: 2 * model.num_layers,
        LAYERS: model.num_layers,
        "hidden": model.hidden,
        "head_dim": model.head_dim,
        "heads": model.num_heads,
        "key-value heads": model.num_kv_heads,
        "ffn_hidden": model.ffn_hidden,
        "vocab_size": model.vocab_size,
    }
    if model.moe is not None:
        sizes |= {"experts": model.moe.num_experts, "top_k": model.moe.top_k}
        sizes |= {"expert_hidden": model.moe.expert_hidden}
    return {name: size for name, size in sizes.items() if size > 1}


def list_options(case: Case) -> dict[str, float]:
    """Return the options of a recipe that may occur as a factor."""
    recipe, model = case.recipe, case.recipe.model.reference
    beta1, beta2 = recipe.optimizer.betas
    options: dict[str, float] = {
        "lr": recipe.optimizer.lr,
        "the first beta": beta1,
        "the second beta": beta2,
        "1 less the first beta": 1.0 - beta1,
        "1 less the second beta": 1.0 - beta2,
        "weight_decay": recipe.optimizer.weight_decay,
        "momentum": recipe.optimizer.momentum,
        "clip_norm": recipe.optimizer.clip_norm or 0.0,
    }
    if model is not None:
        options[INIT_STD] = model.init_std
    if model is not None and model.moe is not None:
        options |= {"route_scale": model.moe.route_scale, "balance_coef": model.moe.balance_coef}
        options["z_coef"] = model.moe.z_coef
    return {name: value for name, value in options.items() if value > 0.0 and value != 1.0}
