"""Cases for faults: small, with every feature enabled that a bug can hide behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeverify.cases.presets import PRESETS
from moeverify.cases.schema import (
    Case,
    Checkpoint,
    Checks,
    Data,
    Layout,
    MoE,
    Optimizer,
    Recipe,
    ReferenceModel,
)

_SGD: dict[str, Any] = {"name": "sgd", "lr": 0.5, "momentum": 0.9, "clip_norm": 0.2}
_ADAMW: dict[str, Any] = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.2}


def make_case(
    name: str,
    *,
    preset: str = "stress",
    optimizer: str = "sgd",
    model: Mapping[str, Any] | None = None,
    moe: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    checks: Mapping[str, Any] | None = None,
    **layout: Any,
) -> Case:
    """Return a float64 case with two steps.

    Mappings replace single fields; other keywords are layout fields. The default optimizer is SGD, because
    it exposes the scale of a gradient, which AdamW hides.
    """
    fields: dict[str, Any] = {**PRESETS[preset], **(model or {})}
    if isinstance(fields.get("moe"), Mapping):
        fields["moe"] = MoE(**{**fields["moe"], **(moe or {})})
    chosen = _SGD if optimizer == "sgd" else _ADAMW
    made = Recipe(
        name=f"fault-{name}",
        model=ReferenceModel(preset=preset, **fields),
        data=Data(**{"batch": 8, "seq_len": 16, "min_valid": 0.4, **(data or {})}),
        optimizer=Optimizer(**chosen),
        **{"steps": 2, "precision": "float64", **(recipe or {})},
    )
    return Case(
        name=name,
        recipe=made,
        layout=Layout(**layout),
        checks=Checks(**{"repeat": "never", **(checks or {})}),
    )


def make_saved_case(name: str, **options: Any) -> Case:
    """Return a case for a checkpoint fault: AdamW with a decaying rate, four steps, saved after two.

    Both cases of such a fault are made here, so that they share one recipe. `options` are passed to
    `make_case`.
    """
    case = make_case(name, optimizer="adamw", recipe={"steps": 4}, **options)
    optimizer = case.recipe.optimizer.model_copy(update={"schedule": "cosine", "warmup_steps": 1})
    recipe = case.recipe.model_copy(update={"optimizer": optimizer, "name": "fault-saved"})
    return case.model_copy(update={"recipe": recipe, "checkpoint": Checkpoint(after=2)})
