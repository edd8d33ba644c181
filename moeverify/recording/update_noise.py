"""How far the noise of gradients moves the updates of an adaptive optimizer: each element's, sign included.

The first steps of Adam are nearly lr * sign(gradient): an element whose gradient lies below its own noise may change
its sign, and then its update is off by 2 lr, however small the noise is. A handful of runs sees that in few tensors.
So the optimizer is run alone, on the golden's gradients pushed towards zero, and through it, by as much as the
gradients may be off:

    g' = g - sign(g) * PUSH * noise(row of g)

What the update then differs by, divided by PUSH, is stored beside the measured noise (`moeverify.checks.bounds`),
since a bound is the tolerance's factor, the same number, times what is stored.

Adam adds its weight decay to the gradient. There it is the sum of both that changes its sign, and a weight that has
gone the other way is in the moments of later steps, which get the same allowance.

Source of the optimizer: Kingma and Ba 2014 (arXiv 1412.6980), algorithm 1; AdamW: arXiv 1711.05101, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.case.schema import Precision, Recipe, Tolerance
from moeverify.checks.base import Watch
from moeverify.golden.noise import sign_flip_key, update_drift_key
from moeverify.golden.store import StoredGolden
from moeverify.layout.region import Region
from moeverify.results.checks import Kind
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import SCALAR, load_state
from moeverify.train.optimizer import optimizer_state
from moeverify.train.optimizer_kinds import OPTIMIZER
from moeverify.train.program import Program
from moeverify.train.state import TrainingState

PUSH = Tolerance().factor
"""By how many times its noise a gradient is pushed: what is found is divided by it and multiplied by the factor."""

MAX_SIGN_FLIPS = 16
"""Cap on the sign flips that are added to a bound.

If more elements were expected to change their sign, calibration would have seen some, and its measured noise already
covers them: none in one run and 16 or more in another has a chance below 3e-6, however many are expected (Poisson;
worst at 8)."""


def is_adaptive(recipe: Recipe) -> bool:
    """Return whether the optimizer rescales gradients that are rounded: then a sign may change by their noise."""
    return recipe.precision != "float64" and recipe.optimizer.name in ("adam", "adamw")


class GradientNoise(Watch[None]):
    """Keeps how far gradients are from the golden's, over all runs that it watches.

    Each row of a tensor (its last dim) has its own noise: the rows of an embedding or of an expert differ by orders
    of magnitude, and so does their rounding. The largest of all runs is kept.
    """

    def __init__(self, reference: StoredGolden) -> None:
        self._reference = reference
        self._rows: dict[tuple[int, str], Tensor] = {}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Measure one gradient; see `Watch`."""
        if kind != Kind.GRADIENT or local is None:
            return
        expected = self._reference.read(step, kind, name, region)
        if expected is None:
            return
        actual = local.detach().reshape(expected.shape)
        error = actual.to(torch.float64) - expected.to(actual.device, torch.float64)
        # The root mean square over a row and not each element's own error: one run is one sample of it.
        rows = error.square().mean(dim=-1, keepdim=True).sqrt() if error.ndim else error.abs()
        known = self._rows.get((step, name))
        self._rows[step, name] = rows if known is None else torch.maximum(rows, known)

    def of(self, step: int, name: str) -> Tensor | None:
        """Return the root mean square of the error in each row, or None where there was no gradient.

        Shape: that of the parameter, its last dim 1. Unit: that of the gradient.
        """
        return self._rows.get((step, name))


def propagate(
    recipe: Recipe, reference: StoredGolden, noise: GradientNoise, device: torch.device, *, forced: bool
) -> dict[str, float]:
    """Return how far updates and moments move by gradients' noise, and how far by sign flips alone, by their keys.

    The optimizer's own rounding is part of the first. Unit: relative to the norm of the golden's update.
    """
    moved = _replay(recipe, reference, noise, device, "float64", forced=True)
    if not forced:
        # With moments that were pushed as well: neither is always the larger, since two pushes may cancel.
        for key, errors in _replay(recipe, reference, noise, device, "float64", forced=False).items():
            moved[key] = torch.maximum(moved[key], errors)
    rounded = _replay(recipe, reference, None, device, recipe.precision, forced=forced)
    found: dict[str, float] = {}
    for (step, name), errors in moved.items():
        drift, flips = (errors / PUSH).tolist()
        found[sign_flip_key(step, name, forced=forced)] = flips
        found[update_drift_key(step, name, forced=forced)] = drift + rounded[step, name][0].item()
    return found


@torch.no_grad()
def _replay(
    recipe: Recipe,
    reference: StoredGolden,
    noise: GradientNoise | None,
    device: torch.device,
    precision: Precision,
    *,
    forced: bool,
) -> dict[tuple[int, str], Tensor]:
    """Return how far each update is from the golden's, after an optimizer in this precision got its gradients.

    With `noise` they are pushed. With `forced` each step starts from the golden's state, else from its own. Where
    the optimizer adds its decay to the gradient, moments are among them from the second step on. Shape: (2,), the
    error of the whole tensor, and of the `MAX_SIGN_FLIPS` elements that moved most of those whose update changed its
    sign, of a moment in a step before, both relative to the norm of the golden's.
    """
    program = assemble_single(recipe, device, compute=precision)
    state = TrainingState.begin(recipe, program)
    decays = _list_added_decays(recipe, state.optimizer)
    turned: dict[str, Tensor] = {}
    found: dict[tuple[int, str], Tensor] = {}
    for step in range(recipe.steps):
        if step > 0 and forced:
            load_state(program, state.optimizer, reference, step - 1)
        _fill_gradients(program, reference, noise, step, decays)
        before = [shard.local().clone() for shard in program.shards]
        state.optimizer.step()
        if decays:
            for name, local, region in optimizer_state(state.optimizer, program.shards):
                is_turned = turned.get(name.rpartition(".")[0])
                right = reference.read(step, Kind.OPTIMIZER_STATE, name, region)
                if is_turned is not None and right is not None and is_turned.shape == local.shape:
                    found[step, name] = _measure(right.to(device).reshape(local.shape), local, is_turned)
        for shard, old in zip(program.shards, before, strict=True):
            right = reference.read(step, Kind.UPDATE, shard.name, shard.region)
            if right is not None:
                right, actual = right.to(device).reshape(old.shape), shard.local() - old
                is_turned = right * actual < 0.0
                found[step, shard.name] = _measure(right, actual, is_turned)
                turned[shard.name] = is_turned | turned.get(shard.name, torch.zeros_like(is_turned))
        state.advance()
    return found


def _fill_gradients(
    program: Program,
    reference: StoredGolden,
    noise: GradientNoise | None,
    step: int,
    decays: Mapping[Tensor, float],
) -> None:
    """Give parameters the golden's gradients of a step, clipped, and pushed by the noise."""
    # The clip's coefficient is the golden's: by how much noise changes the norm of all gradients is far less.
    clip = reference.read(step, Kind.GRADIENT_NORM, "clip_coefficient", SCALAR)
    coefficient = 1.0 if clip is None else float(clip)
    for shard in program.shards:
        gradient = reference.read(step, Kind.GRADIENT, shard.name, shard.region)
        shard.tensor.grad = None
        if gradient is not None:
            gradient = gradient.to(program.device, torch.float64)
            weight = shard.local().to(torch.float64).reshape(gradient.shape)
            used = coefficient * gradient + decays.get(shard.tensor, 0.0) * weight
            pushed = coefficient * push(gradient, None if noise is None else noise.of(step, shard.name), used)
            shard.tensor.grad = pushed.reshape(shard.tensor.shape).to(shard.tensor.dtype)


def _list_added_decays(recipe: Recipe, optimizer: Optimizer) -> dict[Tensor, float]:
    """Return the weight decay of each parameter, where the optimizer adds it to the gradient."""
    if OPTIMIZER.find(recipe.optimizer.name).decays_weight:
        return {}
    groups = [(group["params"], group["weight_decay"]) for group in optimizer.param_groups]
    return {tensor: decay for tensors, decay in groups if decay for tensor in tensors}


def push(gradient: Tensor, rows: Tensor | None, used: Tensor | None = None) -> Tensor:
    """Return a gradient pushed by `PUSH` times the noise of its rows, so that what is `used` of it nears zero.

    It goes through zero where the noise is larger. What is exactly zero has no noise: a row of an embedding that
    nobody used. Shapes: gradient and used (..., n), rows (..., 1).
    """
    if rows is None:
        return gradient
    direction = torch.where(gradient == 0.0, 0.0, (gradient if used is None else used).sign())
    return gradient - direction * (PUSH * rows)


def _measure(expected: Tensor, actual: Tensor, turned: Tensor) -> Tensor:
    """Return the error of a tensor, and that of elements that have `turned`, relative to the norm of `expected`.

    Shape: (2,).
    """
    expected, actual = expected.to(torch.float64), actual.to(torch.float64)
    error = actual - expected
    flips = torch.where(turned, error, 0.0).abs().reshape(-1)
    flips = torch.topk(flips, min(MAX_SIGN_FLIPS, flips.numel()), sorted=False).values
    norm = torch.linalg.vector_norm(expected)
    # An update of exactly zero is judged absolutely, so nobody asks for its noise.
    sizes = torch.stack([torch.linalg.vector_norm(error), torch.linalg.vector_norm(flips)])
    return torch.where(norm > 0.0, sizes / norm, 0.0)
