"""Test whether a module computed a wrong output with the weights of the previous step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moeverify.cases.schema import Recipe
from moeverify.explain.fitting.components import load_weights
from moeverify.explain.fitting.first_divergence import Divergence
from moeverify.train.assemble import assemble_single
from moeverify.verification.golden.store import StoredGolden

_SAME = 1e-9


def explains_stale(
    recipe: Recipe, golden: StoredGolden, step: int, origin: Divergence, device: torch.device
) -> bool | None:
    """Return whether the golden weights of the previous step produce the wrong output.

    All weights that the module itself holds are tried together, then one by one. Return None before step 1,
    in other precisions than float64, without a reference model, or if the module holds no parameters or its
    input is unknown.
    """
    if step < 1 or recipe.precision != "float64" or recipe.model.reference is None:
        return None
    if origin.input is None or origin.end != "output":
        return None
    program = assemble_single(recipe, device, compute="float64")
    if step > 1:
        load_weights(program, golden, step - 2)
    module = dict(program.model.named_modules()).get(origin.module)
    if module is None:
        return None
    old = {name: weight.detach().clone() for name, weight in module.named_parameters(recurse=False)}
    if not old:
        return None
    load_weights(program, golden, step - 1)
    new = {name: weight.detach().clone() for name, weight in module.named_parameters(recurse=False)}
    # A bucket may hold a single weight; a module that was not gathered again has all old weights.
    choices = [old, *({**new, name: value} for name, value in old.items())]
    return any(_gives(module, chosen, origin, device) for chosen in choices)


@torch.no_grad()
def _gives(
    module: nn.Module, weights: Mapping[str, Tensor], origin: Divergence, device: torch.device
) -> bool:
    """Return whether a module with these weights produces the output that was read."""
    assert origin.input is not None
    for name, weight in module.named_parameters(recurse=False):
        weight.copy_(weights[name])
    output = module(origin.input.to(device=device, dtype=torch.float64)).cpu()
    actual = origin.tensor.whole
    return float((output - actual).norm()) < _SAME * float(actual.norm())
