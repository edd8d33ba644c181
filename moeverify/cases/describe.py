"""Short descriptions of recipes for tables and reports."""

from __future__ import annotations

from moeverify.cases.schema import MoE, Recipe


def describe_recipe(recipe: Recipe) -> str:
    """Return a one-line description of a recipe.

    Example: `gpt: 4 layers, hidden 1024, dense, adamw, float64, 2 steps of 8x16 tokens`.
    """
    steps = f"{recipe.steps} step{'s' if recipe.steps > 1 else ''}"
    size = f"{recipe.data.batch}x{recipe.data.seq_len}"
    return f"{_describe_model(recipe)}, {recipe.optimizer.name}, {recipe.precision}, {steps} of {size} tokens"


def _describe_model(recipe: Recipe) -> str:
    model = recipe.model.reference
    if model is None:
        return recipe.model.title
    head = f"{model.preset}: " if model.preset else ""
    layers = f"{model.num_layers} layer{'s' if model.num_layers > 1 else ''}"
    return f"{head}{layers}, hidden {model.hidden}, {_describe_experts(model.moe)}"


def _describe_experts(moe: MoE | None) -> str:
    return "dense" if moe is None else f"{moe.num_experts} experts top-{moe.top_k}"
