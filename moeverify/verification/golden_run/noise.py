"""Distance of one device from a golden by rounding alone. Bounds are multiples of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeverify.cases.schema import Precision, Recipe
from moeverify.hashing import hash_counter, in_chunks, key_of
from moeverify.model.float8_scaling import FLOAT8
from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.bound import PerturbedRun
from moeverify.results.checks import ZERO_KINDS, Kind
from moeverify.train.assemble import assemble_single
from moeverify.train.data import Share
from moeverify.train.loop import train
from moeverify.train.program import NearTieCounts, TrainingProgram
from moeverify.train.subjects import replays_routing
from moeverify.verification.checks.base import Check, Training, Watch
from moeverify.verification.checks.observers import open_observers
from moeverify.verification.compare.comparison import Comparison
from moeverify.verification.compare.difference import TensorDifference
from moeverify.verification.golden.noise import (
    EPSILON,
    FREE_KEY,
    HELD_KEY,
    PERTURBED_RUNS,
    PLAIN,
    WIDEST,
    narrow_key,
    noise_key,
    sign_flip_key,
    storage_key,
)
from moeverify.verification.golden.store import StoredGolden
from moeverify.verification.golden_run.narrow_rounding import MovedFloat8, MovedRoundings
from moeverify.verification.golden_run.rewritten_gradients import RewrittenGradients, list_turns, share_noise
from moeverify.verification.golden_run.update_noise import GradientNoise, is_adaptive, propagate

# The least error that moved roundings of float32 can cause; below it a tensor does not depend on them.
_NARROW_FLOOR = 1e-12

_OF_GRADIENTS = (Kind.GRADIENT, Kind.UPDATE)
_OF_STEP = (Kind.UPDATE, Kind.WEIGHT, Kind.OPTIMIZER_STATE)

# Relative change of each initial weight: one unit of its dtype.
# A forward pass in mixed precision rounds weights to bfloat16 and would not see a unit of float32: the run
# would repeat the plain one, and the noise would be that of a single run. With a quarter of a unit of bfloat16
# many weights, and all values after them, are rounded anew.
_NUDGE: Mapping[Precision, float] = {**EPSILON, "mixed": 2.0**-9}

# Runs with moved roundings. Their errors are added: one run may change a single number by almost nothing.
_MOVED_RUNS = 3


def calibrate(
    recipe: Recipe,
    reference: StoredGolden,
    checks: Sequence[Check[Any]],
    device: torch.device,
    *,
    has_narrow_parts: bool = False,
    own_updates: Collection[str] = (),
) -> dict[str, float]:
    """Return the largest noise of each logical tensor over all perturbed programs, by `noise_key`.

    `has_narrow_parts` says that a user's model computes below float64 in a float64 recipe. The noise of
    these parts is separate, by `narrow_key`: a tensor that does not depend on them has none. `own_updates`
    are the parameters that a user's step does not update like the recipe's optimizer.

    Below float64, the noise of forced steps is measured separately. Rounding errors grow from step to step,
    and the error of a free run is not noise of a step that starts from the golden's state. For adaptive
    optimizers, the result also has the effect of gradient noise on updates, by `update_drift_key` and
    `sign_flip_key`. Units: see `moeverify.verification.checks.bounds`.
    """
    noise: dict[str, float] = {}
    turned: dict[str, float] = {}
    choices = NearTieCounts()
    is_narrow = recipe.precision != "float64"
    for forced in [False, True] if is_narrow and recipe.steps > 1 else [False]:
        gradients = GradientNoise(reference) if is_narrow and is_adaptive(recipe) else None
        runs: list[RewrittenGradients] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for name, program in perturbed_programs(recipe, device):
            watches: list[Watch[Any]] = [] if gradients is None else [gradients]
            runs += [RewrittenGradients(program)] if is_narrow and recipe.step is not None else []
            watches += runs[-1:]
            measured = measure_noise(recipe, program, reference, checks, forced=forced, watches=watches)
            if name == "plain":
                noise |= {f"{PLAIN}{key}": error for key, error in measured.items()}
                noise |= _measure_storage(recipe, program, reference)
            _widen(noise, measured, name)
            shapes = {shard.name: shard.region.shape for shard in program.shards}
            choices.num_changed += program.near_ties.num_changed
            choices.num_free += program.near_ties.num_free
        if gradients is not None:
            noise |= propagate(recipe, reference, gradients, device, forced=forced, left_out=own_updates)
        if choices.num_changed:
            _widen(noise, _measure_own_choices(recipe, reference, device, forced=forced), "own choices")
        rewritten = runs[0].report() if runs else frozenset()
        shared = {Kind.GRADIENT: rewritten, Kind.UPDATE: rewritten | set(own_updates)}
        noise |= share_noise(noise, shared, shapes, recipe.steps, forced=forced)
        for ((step, tensor), error), kind in itertools.product(list_turns(runs).items(), _OF_GRADIENTS):
            turned[noise_key(step, kind, tensor, forced=forced)] = error
    noise |= {key: max(noise.get(key, 0.0), error) for key, error in turned.items()}  # not shared
    noise |= {HELD_KEY: float(choices.num_changed), FREE_KEY: float(choices.num_free)}
    if has_narrow_parts:
        noise |= _measure_narrow(recipe, reference, checks, device, own_updates)
    return noise


def _widen(noise: dict[str, float], measured: Mapping[str, float], run: PerturbedRun) -> None:
    """Replace the noise of each tensor that a run shows to be larger, with the run's number by `WIDEST`."""
    for key, error in measured.items():
        if error > noise.get(key, 0.0):
            noise |= {key: error, f"{WIDEST}{key}": float(PERTURBED_RUNS.index(run))}
        noise.setdefault(key, error)


def _measure_own_choices(
    recipe: Recipe, reference: StoredGolden, device: torch.device, *, forced: bool
) -> dict[str, float]:
    """Return the noise of buffers, such as loads of experts, in a run that makes its own choices near a tie.

    Ranks do not find the golden's choice for each of their rows. Such a row changes a gradient a little. It
    changes a count of tokens by one, and a bias that moves by the sign of a count by a whole step.
    """
    program = assemble_single(recipe, device)
    keys = {
        noise_key(step, Kind.BUFFER, shard.name, forced=forced)
        for step in range(recipe.steps)
        for shard in program.live_buffers()
    }
    if not keys:
        return {}
    measured = measure_noise(recipe, program, reference, forced=forced, follows_choices=False)
    return {key: error for key, error in measured.items() if key in keys}


def _measure_storage(recipe: Recipe, program: TrainingProgram, reference: StoredGolden) -> dict[str, float]:
    """Return the error of each update by rounding the golden's weight after it, by `storage_key`."""
    found: dict[str, float] = {}
    for step in range(recipe.steps):
        for shard in program.shards:
            update = reference.read(step, Kind.UPDATE, shard.name, shard.region)
            weight = reference.read(step, Kind.WEIGHT, shard.name, shard.region)
            if update is not None and weight is not None and update.any():
                rounded = weight.to(shard.local().dtype).to(torch.float64)
                error = float((rounded - weight.to(torch.float64)).norm() / update.to(torch.float64).norm())
                found[storage_key(step, shard.name)] = error
    return found


def _measure_narrow(
    recipe: Recipe,
    reference: StoredGolden,
    checks: Sequence[Check[Any]],
    device: torch.device,
    own_updates: Collection[str],
) -> dict[str, float]:
    """Return the effect of moved roundings on each logical tensor that they change, by `narrow_key`.

    An adaptive optimizer turns a small error of a gradient into a step in the other direction. Few runs show
    that, so updates also get the flips that the measured errors of the gradients allow.
    """
    noise: dict[str, float] = {}
    gradients = GradientNoise(reference) if is_adaptive(recipe) else None
    for number in range(_MOVED_RUNS):
        program = assemble_single(recipe, device)
        tensors = [shard.tensor for shard in program.shards]
        program.loss_context = partial(MovedRoundings, recipe.seed + number, tensors)
        watches = [] if gradients is None else [gradients]
        for key, error in measure_noise(recipe, program, reference, checks, watches=watches).items():
            noise[key] = noise.get(key, 0.0) + error
    flips: dict[str, float] = {}
    if gradients is not None:
        flips = propagate(recipe, reference, gradients, device, forced=False, left_out=own_updates)
    found: dict[str, float] = {}
    for key, error in noise.items():
        step, kind, name = key.split("/", 2)
        flipped = flips.get(sign_flip_key(int(step), name), 0.0) if kind in _OF_STEP else 0.0
        if error > _NARROW_FLOOR:
            found[narrow_key(int(step), kind, name)] = max(error, flipped)
    return found


def perturbed_programs(
    recipe: Recipe, device: torch.device
) -> Iterator[tuple[PerturbedRun, TrainingProgram]]:
    """Yield single-device programs that compute the recipe's answer up to rounding, with their names.

    These are

    - the unmodified program, if the recipe's precision is not float64 as in the golden
    - rows in another order
    - rows in other micro-batches, if the answer does not depend on them
    - initial weights off by one unit in the last place, or a part of one in mixed precision
    - the programs of `perturbed_scales`

    Layouts change the same properties: the order of sums, the share of the batch in one product, and the
    rounding of inputs.
    """
    if recipe.precision != "float64":
        yield "plain", assemble_single(recipe, device)
    rows = list(range(recipe.data.batch))
    random.Random(recipe.seed).shuffle(rows)
    positions = range(recipe.data.seq_len)
    yield "other order", assemble_single(recipe, device, share=Share(tuple(rows), positions))
    if can_accumulate(recipe):
        regrouped = assemble_single(recipe, device, share=Share(tuple(reversed(rows)), positions))
        regrouped.num_micro_batches = 2
        yield "micro-batches", regrouped
    nudged = assemble_single(recipe, device)
    _nudge(nudged, _NUDGE[recipe.precision], recipe.seed)
    yield "moved weights", nudged
    for program in perturbed_scales(recipe, device):
        yield "float8", program


def perturbed_scales(recipe: Recipe, device: torch.device) -> Iterator[TrainingProgram]:
    """Yield single-device programs that compute the recipe's answer up to rounding to float8.

    A scale over several tokens includes the tokens of one rank. Single rows are the finest split by
    data-parallel ranks. If values are rounded before, operands may also cross the midpoint between two
    float8 numbers.
    """
    if recipe.float8 == "none":
        return
    if FLOAT8.find(recipe.float8).depends_on_tokens:
        parted = assemble_single(recipe, device)
        parted.num_micro_batches = recipe.data.batch
        yield parted
    if recipe.precision != "float64":
        crossed = assemble_single(recipe, device)
        crossed.loss_context = MovedFloat8
        yield crossed


def can_accumulate(recipe: Recipe) -> bool:
    """Return whether the recipe's answer is independent of the micro-batches.

    A balance loss over the batch is a product of batch means, so the sum over two halves differs. For a
    user's own step the answer is unknown, because the run verifies exactly its use of micro-batches.
    """
    if recipe.data.batch % 2 or recipe.step is not None:
        return False
    moe = recipe.model.moe
    return moe is None or moe.balance_scope == "sequence" or moe.balance_coef == 0.0


@torch.no_grad()
def _nudge(program: TrainingProgram, epsilon: float, seed: int) -> None:
    """Change every weight up or down by one unit in the last place of a number of its size."""
    for shard in program.shards:
        local = shard.local()
        index = shard.region.flat_index(device=local.device)
        odd = in_chunks(partial(_is_odd, key_of(seed, "nudge", shard.name)), index)
        sign = 1.0 - 2.0 * odd.to(torch.float64)
        local.copy_((local.to(torch.float64) * (1.0 + epsilon * sign)).to(local.dtype))


def _is_odd(key: int, index: Tensor) -> Tensor:
    return hash_counter(key, index) & 1 == 1


def measure_noise(
    recipe: Recipe,
    program: TrainingProgram,
    reference: StoredGolden,
    checks: Sequence[Check[Any]] = (),
    *,
    forced: bool = False,
    follows_choices: bool = True,
    watches: Sequence[Watch[Any]] = (),
) -> dict[str, float]:
    """Return the distance of a single-device run from the golden, for each logical tensor by `noise_key`.

    The distance is relative to the norm of the golden, or the largest absolute error for kinds that are
    zero by definition. `watches` see all tensors of the run, too. Without `follows_choices` a user's model makes
    its own choices near a tie.
    """
    comparison = Comparison(reference, hash_bits=False)
    training = Training(recipe, program, golden=reference)
    with open_observers(training, comparison, checks, list(watches)) as observer:
        train(
            recipe,
            program,
            observer,
            golden=reference,
            replay_routing=replays_routing(recipe),
            forced=forced,
            follows_choices=follows_choices,
        )
    totals: dict[str, tuple[str, TensorDifference]] = {}
    for entry in comparison.entries():
        if entry.step == INITIAL:
            continue
        key = noise_key(entry.step, entry.kind, entry.name, forced=forced)
        known = totals.get(key)
        totals[key] = (entry.kind, known[1].merge(entry.difference) if known else entry.difference)
    return {
        key: difference.max_error if kind in ZERO_KINDS else _finite(difference.relative_error)
        for key, (kind, difference) in totals.items()
    }


def _finite(error: float) -> float:
    # A tensor with an expected norm of zero has an absolute bound, so its noise is never used.
    return error if error != float("inf") else 0.0
