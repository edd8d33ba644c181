"""The content of the golden's file in git: losses and norms of every step, and fingerprints of tensors."""

from __future__ import annotations

from typing import Any

from moeverify.cases.schema import Recipe
from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.checks import Kind
from moeverify.verification.golden.fingerprint import Fingerprints
from moeverify.verification.golden.proximity import Fingerprint
from moeverify.verification.golden.sketched import fingerprint
from moeverify.verification.golden.store import StoredGolden

# Kinds that the file in git has only for the last step, because other steps would be redundant.
_LAST_STEP_KINDS = (Kind.GRADIENT, Kind.UPDATE, Kind.OPTIMIZER_STATE, Kind.BUFFER, Kind.ROUTER_IDS)


def summarize(recipe: Recipe, golden: StoredGolden) -> dict[str, Any]:
    """Return the content of the file in git: losses and norms of every step, and tensor fingerprints.

    The keys are `losses` and `tensors`, both by `step/kind/name`.
    """
    losses: dict[str, float] = {}
    tensors: dict[str, Fingerprint] = {}
    fingerprints = Fingerprints()
    for step in range(INITIAL, recipe.steps):
        for key in golden.keys(step):
            kind, _, name = key.partition("/")
            if kind in (Kind.LOSS, Kind.GRADIENT_NORM):
                losses[f"{step}/{kind}/{name}"] = float(f"{golden.whole(step, key).item():.13g}")
            elif _is_filed(step, kind, recipe.steps - 1):
                stored = golden.whole(step, key)
                is_sketch = key in golden.sketches
                tensors[f"{step}/{key}"] = fingerprint(stored) if is_sketch else fingerprints.make(stored)
    return {"losses": losses, "tensors": tensors}


def _is_filed(step: int, kind: str, last: int) -> bool:
    """Return whether the file in git has the fingerprints of this kind at this step.

    Tensors of optional checks are excluded, because all cases of a recipe share one file.
    """
    if kind not in set(Kind):
        return False
    is_first_gradient = step == 0 and kind == Kind.GRADIENT
    return step == INITIAL or is_first_gradient or (step == last and kind in _LAST_STEP_KINDS)
