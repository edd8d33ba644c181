"""Effect of gradient noise on the updates of an adaptive optimizer, element by element, including the sign.

The first steps of Adam are nearly lr * sign(gradient). If a gradient element is smaller than its noise, its
sign may change. Its update is then off by 2 lr, however small the noise is. A handful of runs shows this in
only a few tensors. The optimizer is therefore run alone, on the golden's gradients after a push toward
zero, and through zero, by the possible error of the gradients:

    g' = g - sign(g) * PUSH * noise(row of g)

The difference of the update, divided by PUSH, is stored beside the measured noise
(`moeverify.verification.checks.bounds`). A bound is the tolerance's factor, which equals PUSH, times the
stored value.

Adam adds its weight decay to the gradient. There, the sign of the sum of both matters. A weight that moved
in the other direction also affects the moments of later steps, which get the same allowance.

A second moment holds squares of gradients. An error of a gradient that grows by PUSH adds PUSH times its linear
term to a square, which is PUSH times the measured error, but PUSH ** 2 times its quadratic term. The rest of that
term is stored too (`squares_key`). It is small where the noise is.

Source of the optimizer: Kingma and Ba 2014 (arXiv 1412.6980), algorithm 1; AdamW: arXiv 1711.05101,
algorithm 2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.cases.schema import Precision, Recipe, Tolerance
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import SCALAR, load_state
from moeverify.train.optimizer import optimizer_state
from moeverify.train.optimizer_kinds import OPTIMIZER
from moeverify.train.program import TrainingProgram
from moeverify.train.state import TrainingState
from moeverify.verification.checks.base import Watch
from moeverify.verification.golden.noise import sign_flip_key, squares_key, update_drift_key
from moeverify.verification.golden.store import StoredGolden

PUSH = Tolerance().factor
"""The push of a gradient as a multiple of its noise.

The result is divided by it, and later multiplied by the tolerance's factor.
"""

MAX_SIGN_FLIPS = 16
"""The maximum number of sign flips that are added to a bound.

If more elements were expected to change their sign, calibration would have seen some, and its measured
noise already includes them. No flip in one run and 16 or more in another has a probability below 3e-6, for
any expected number (Poisson; worst at 8).
"""


def is_adaptive(recipe: Recipe) -> bool:
    """Return whether the optimizer rescales gradients, so that their noise may change the sign of a step."""
    return recipe.optimizer.name in ("adam", "adamw")


class GradientNoise(Watch[None]):
    """Records the distance of gradients from the golden's, over all observed runs.

    Each row of a tensor (its last dim) has its own noise. The rows of an embedding or an expert differ by
    orders of magnitude, and so does their rounding. The maximum over all runs is stored.
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
        # The root mean square over a row, not the error of each element, because one run gives only one
        # sample of it.
        rows = error.square().mean(dim=-1, keepdim=True).sqrt() if error.ndim else error.abs()
        known = self._rows.get((step, name))
        self._rows[step, name] = rows if known is None else torch.maximum(rows, known)

    def of(self, step: int, name: str) -> Tensor | None:
        """Return the root mean square error of each row, or None if there was no gradient.

        Shape: the parameter's shape with a last dim of 1. Unit: as the gradient.
        """
        return self._rows.get((step, name))

    def list_names(self) -> list[str]:
        """Return the names of all parameters that had a gradient."""
        return sorted({name for _, name in self._rows})


def propagate(
    recipe: Recipe,
    reference: StoredGolden,
    noise: GradientNoise,
    device: torch.device,
    *,
    forced: bool,
    left_out: Collection[str] = (),
) -> dict[str, float]:
    """Return the change of updates and moments by gradient noise, and by sign flips alone, by key.

    The keys are `update_drift_key`, whose value includes the rounding of the optimizer, `sign_flip_key`, and
    `squares_key` for second moments. Unit: relative to the norm of the golden's tensor. Parameters that are
    `left_out` have another optimizer, which is not known here.
    """
    moved = _replay(recipe, reference, noise, device, "float64", forced=True)
    if not forced:
        # Pushed moments may have a larger or smaller effect, since two pushes may cancel. Use the maximum
        # of both.
        for key, errors in _replay(recipe, reference, noise, device, "float64", forced=False).items():
            moved[key] = torch.maximum(moved[key], errors)
    rounded = _replay(recipe, reference, None, device, recipe.precision, forced=forced)
    found: dict[str, float] = {}
    for (step, name), errors in moved.items():
        if name in left_out:
            continue
        drift, flips = (errors / PUSH).tolist()
        found[sign_flip_key(step, name, forced=forced)] = flips
        found[update_drift_key(step, name, forced=forced)] = drift + rounded[step, name][0].item()
    return found | _grow_squares(recipe, reference, noise, forced=forced)


@torch.no_grad()
def _grow_squares(
    recipe: Recipe, reference: StoredGolden, noise: GradientNoise, *, forced: bool
) -> dict[str, float]:
    """Return the quadratic term of gradient noise in each second moment, beyond PUSH times itself.

    The result is by `squares_key`, and divided by PUSH.
    """
    decay, found = recipe.optimizer.betas[1], {}
    for name in noise.list_names():
        squares = torch.zeros(())
        for step in range(recipe.steps):
            moment = reference.find(step, Kind.OPTIMIZER_STATE, f"{name}.exp_avg_sq")
            rows = noise.of(step, name)
            if moment is None or rows is None or not moment.any():
                continue
            fresh = (1.0 - decay) * (_read_clip(reference, step) * rows.cpu()).square()
            squares = fresh if forced else decay * squares + fresh
            size = torch.linalg.vector_norm(squares.expand_as(moment).to(torch.float64))
            share = float(size / torch.linalg.vector_norm(moment.to(torch.float64)))
            found[squares_key(step, f"{name}.exp_avg_sq", forced=forced)] = (PUSH - 1.0) * share
    return found


def _read_clip(reference: StoredGolden, step: int) -> float:
    """Return the golden's clip coefficient of a step; noise changes the norm of all gradients far less."""
    clip = reference.read(step, Kind.GRADIENT_NORM, "clip_coefficient", SCALAR)
    return 1.0 if clip is None else float(clip)


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
    """Return the distance of each update from the golden's, for an optimizer in this precision.

    The optimizer gets the golden's gradients, pushed if `noise` is given. With `forced`, each step starts
    from the golden's state, otherwise from its own. If the optimizer adds its decay to the gradient,
    moments are included from the second step on.

    Shape: (2,), relative to the norm of the golden's tensor. The first number is the error of the whole
    tensor. The second one is the error of the `MAX_SIGN_FLIPS` elements with the largest error whose update
    changed its sign; for a moment, in an earlier step.
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
    program: TrainingProgram,
    reference: StoredGolden,
    noise: GradientNoise | None,
    step: int,
    decays: Mapping[Tensor, float],
) -> None:
    """Set the gradients of parameters to the golden's gradients of a step, clipped and pushed by the noise."""
    coefficient = _read_clip(reference, step)
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
    """Return the weight decay of each parameter, if the optimizer adds it to the gradient."""
    if OPTIMIZER.find(recipe.optimizer.name).decays_weight:
        return {}
    groups = [(group["params"], group["weight_decay"]) for group in optimizer.param_groups]
    return {tensor: decay for tensors, decay in groups if decay for tensor in tensors}


def push(gradient: Tensor, rows: Tensor | None, used: Tensor | None = None) -> Tensor:
    """Return a gradient pushed by `PUSH` times the noise of its rows, so that `used` moves toward zero.

    `used` is the gradient with weight decay; the default is the gradient itself. It crosses zero if the
    noise is larger. Elements that are exactly zero have no noise, such as an unused row of an embedding.
    Shapes: gradient and used (..., n), rows (..., 1).
    """
    if rows is None:
        return gradient
    direction = torch.where(gradient == 0.0, 0.0, (gradient if used is None else used).sign())
    return gradient - direction * (PUSH * rows)


def _measure(expected: Tensor, actual: Tensor, turned: Tensor) -> Tensor:
    """Return the error of a tensor and of its `turned` elements, relative to the norm of `expected`.

    Shape: (2,).
    """
    expected, actual = expected.to(torch.float64), actual.to(torch.float64)
    error = actual - expected
    flips = torch.where(turned, error, 0.0).abs().reshape(-1)
    flips = torch.topk(flips, min(MAX_SIGN_FLIPS, flips.numel()), sorted=False).values
    norm = torch.linalg.vector_norm(expected)
    # A zero update has an absolute bound, so its noise is never used.
    sizes = torch.stack([torch.linalg.vector_norm(error), torch.linalg.vector_norm(flips)])
    return torch.where(norm > 0.0, sizes / norm, 0.0)
