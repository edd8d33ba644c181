"""How far the noise of gradients moves the updates of an adaptive optimizer: each element's, sign included.

The first steps of Adam are nearly lr * sign(gradient): an element whose gradient lies below its own noise may turn,
and then its update is off by 2 lr, however small the noise is. A handful of runs sees that in few tensors. So the
optimizer is run alone, on the golden's gradients pushed towards zero, and through it, by as much as the gradients
may be off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeverify.case.schema import Precision, Recipe, Tolerance
from moeverify.compare.bounds import sign_flip_key, update_drift_key
from moeverify.golden.store import StoredGolden
from moeverify.layout.observer import Observer
from moeverify.layout.region import Region
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import SCALAR, load_state
from moeverify.train.state import TrainingState

PUSH = Tolerance().factor
"""By how many times its noise a gradient is pushed: what is found is divided by it and multiplied by the factor."""

MANY = 16
"""Of so many turning elements calibration sees some: if n are expected, none in one run and `MANY` in the next has a
chance of at most 3e-6 (n = 8). What it has seen, the factor multiplies."""


def is_adaptive(recipe: Recipe) -> bool:
    """Return whether an update may turn by a gradient's noise: rounding, through an optimizer that rescales."""
    return recipe.precision != "float64" and recipe.optimizer.name in ("adam", "adamw")


class GradientNoise:
    """An observer that keeps how far gradients are from the golden's, and shows everything to another observer.

    Each row of a tensor (its last dim) has its own noise: the rows of an embedding or of an expert differ by orders
    of magnitude, and so does their rounding. The largest of all runs is kept.
    """

    def __init__(self, reference: StoredGolden) -> None:
        self._reference = reference
        self._observer: Observer | None = None
        self._rows: dict[tuple[int, str], Tensor] = {}

    def before(self, observer: Observer) -> GradientNoise:
        """Return this observer, which shows all to `observer` from now on."""
        self._observer = observer
        return self

    def begin_step(self, step: int) -> None:
        """Hear that a step begins."""
        if self._observer is not None:
            self._observer.begin_step(step)

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Take one piece; see `moeverify.layout.observer.Observer`."""
        if self._observer is not None:
            self._observer.observe(step, kind, name, local, region)
        if kind != "gradient" or local is None:
            return
        expected = self._reference.read(step, kind, name, region)
        if expected is None:
            return
        actual = local.detach().reshape(expected.shape)
        error = actual.to(torch.float64) - expected.to(actual.device, torch.float64)
        rows = error.square().mean(dim=-1, keepdim=True).sqrt() if error.ndim else error.abs()
        known = self._rows.get((step, name))
        self._rows[step, name] = rows if known is None else torch.maximum(rows, known)

    def of(self, step: int, name: str) -> Tensor | None:
        """Return the root mean square of the error in each row, or None where there was no gradient.

        Shape: that of the parameter, its last dim 1.
        """
        return self._rows.get((step, name))


def propagate(
    recipe: Recipe, reference: StoredGolden, noise: GradientNoise, device: torch.device, *, forced: bool
) -> dict[str, float]:
    """Return how far each update moves by the gradients' noise, and how far by its elements that turn, by their keys.

    The optimizer's own rounding is part of the first.
    """
    moved = _replay(recipe, reference, noise, device, "float64", forced=True)
    if not forced:
        # With moments that were pushed as well: neither is always the larger, since two pushes may cancel.
        for key, errors in _replay(recipe, reference, noise, device, "float64", forced=False).items():
            moved[key] = torch.maximum(moved[key], errors)
    rounded = _replay(recipe, reference, None, device, recipe.precision, forced=forced)
    found: dict[str, float] = {}
    for (step, name), errors in moved.items():
        whole, turned = (errors / PUSH).tolist()
        found[sign_flip_key(step, name, forced=forced)] = turned
        found[update_drift_key(step, name, forced=forced)] = whole + rounded[step, name][0].item()
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

    With `noise` they are pushed. With `forced` each step starts from the golden's state, else from its own. Shape:
    (2,), the error of the whole tensor, and of those elements whose sign turned the `MANY` that moved most, both
    relative to the norm of the golden's.
    """
    program = assemble_single(recipe, device, compute=precision)
    state = TrainingState.begin(recipe, program)
    found: dict[tuple[int, str], Tensor] = {}
    for step in range(recipe.steps):
        if step > 0 and forced:
            load_state(program, state.optimizer, reference, step - 1)
        clip = reference.read(step, "gradient_norm", "clip_coefficient", SCALAR)
        for held in program.shards:
            gradient = reference.read(step, "gradient", held.name, held.region)
            held.tensor.grad = None
            if gradient is not None:
                rows = None if noise is None else noise.of(step, held.name)
                pushed = push(gradient.to(device, torch.float64), rows)
                pushed = pushed if clip is None else pushed * clip.to(pushed)
                held.tensor.grad = pushed.reshape(held.tensor.shape).to(held.tensor.dtype)
        before = [held.local().clone() for held in program.shards]
        state.optimizer.step()
        for held, old in zip(program.shards, before, strict=True):
            expected = reference.read(step, "update", held.name, held.region)
            if expected is not None:
                found[step, held.name] = _errors(expected.to(device), held.local() - old)
        state.advance()
    return found


def push(gradient: Tensor, rows: Tensor | None) -> Tensor:
    """Return a gradient pushed towards zero, and through it, by `PUSH` times the noise of its rows.

    What is exactly zero has no noise: a row of an embedding that nobody used.
    """
    return gradient if rows is None else gradient - gradient.sign() * (PUSH * rows)


def _errors(expected: Tensor, actual: Tensor) -> Tensor:
    expected, actual = expected.to(torch.float64), actual.to(torch.float64)
    error = actual.reshape(expected.shape) - expected
    turned = torch.where(expected * actual.reshape(expected.shape) < 0.0, error, 0.0).abs().reshape(-1)
    turned = torch.topk(turned, min(MANY, turned.numel()), sorted=False).values
    norm = torch.linalg.vector_norm(expected)
    # An update of exactly zero is judged absolutely, so nobody asks for its noise.
    sizes = torch.stack([torch.linalg.vector_norm(error), torch.linalg.vector_norm(turned)])
    return torch.where(norm > 0.0, sizes / norm, 0.0)
