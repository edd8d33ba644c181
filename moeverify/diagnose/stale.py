"""A module that computes with the weights of a step earlier, from the right input."""

from __future__ import annotations

import torch

from moeverify.case.schema import Recipe
from moeverify.diagnose.components import load_weights
from moeverify.diagnose.first_divergence import Origin
from moeverify.golden.store import StoredGolden
from moeverify.train.assemble import assemble_single

_SAME = 1e-9


def explains_stale(
    recipe: Recipe, golden: StoredGolden, step: int, origin: Origin, device: torch.device
) -> bool | None:
    """Return whether the golden's weights of a step earlier give the wrong output that was read.

    Asked of modules that hold parameters themselves, in float64, from step 1 on; None where it cannot be asked.
    """
    if step < 1 or recipe.precision != "float64" or recipe.model.reference is None:
        return None
    if origin.input is None or origin.end != "output":
        return None
    program = assemble_single(recipe, device, compute="float64")
    if step > 1:
        load_weights(program, golden, step - 2)
    module = dict(program.model.named_modules()).get(origin.module)
    if module is None or not list(module.parameters(recurse=False)):
        return None
    with torch.no_grad():
        output = module(origin.input.to(device=device, dtype=torch.float64)).cpu()
    actual = origin.tensor.whole
    return float((output - actual).norm()) < _SAME * float(actual.norm())
