"""On a rank: make the golden of a recipe on this one device, measure its noise, and fingerprint it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moeverify.case.schema import Recipe
from moeverify.compare.bounds import EPSILON, noise_key
from moeverify.compare.comparison import Comparison
from moeverify.golden.fingerprint import fingerprint
from moeverify.golden.proximity import Fingerprint
from moeverify.golden.store import GoldenWriter, StoredGolden
from moeverify.hashing import hash_counter, key_of
from moeverify.layout.observer import INITIAL
from moeverify.results.checks import ZERO_KINDS
from moeverify.train.assemble import assemble_single
from moeverify.train.data import Share
from moeverify.train.loop import train
from moeverify.train.program import Program
from moeverify.worker.propagation import GradientNoise, is_adaptive, propagate
from moeverify.worker.soundness import check_soundness

# Precisions whose rounding, 2**-9, leaves nothing to be seen of that of float32, 2**-25.
COARSE = ("bfloat16", "mixed")

# Kinds that the file in git has for the last step only; those of every step would only repeat them.
_LAST_STEP_KINDS = ("gradient", "update", "optimizer_state", "buffer", "router_ids")


def make_golden(recipe: Recipe, folder: Path, device: torch.device) -> None:
    """Write the full golden of a recipe to `folder`: the float64 run, and the noise of the recipe's precision."""
    with GoldenWriter(folder) as writer:
        train(recipe, assemble_single(recipe, device, compute="float64"), writer)
        reference = StoredGolden(writer.flush(), finished=False)
        if recipe.model.functions:
            check_soundness(recipe, reference, device)
        summary = summarize(recipe, reference)
        if recipe.precision in COARSE:
            writer.narrow()
            reference = StoredGolden(writer.flush(), finished=False)
        writer.finish(calibrate(recipe, reference, device), summary)


def calibrate(recipe: Recipe, reference: StoredGolden, device: torch.device) -> dict[str, float]:
    """Return the largest noise of each logical tensor over all perturbed programs, by `noise_key`.

    That of forced steps is measured on its own below float64, where rounding grows from step to step: an
    error that a free run may have by then is no noise of a step that starts from the golden's state. What the
    noise of gradients does to the updates of an adaptive optimizer comes with it, by `update_drift_key` and
    `sign_flip_key`.
    """
    noise: dict[str, float] = {}
    kinds = [False, True] if recipe.precision != "float64" and recipe.steps > 1 else [False]
    for forced in kinds:
        gradients = GradientNoise(reference) if is_adaptive(recipe) else None
        for program in perturbed_programs(recipe, device):
            measured = measure_noise(recipe, program, reference, forced=forced, gradients=gradients)
            for key, error in measured.items():
                noise[key] = max(noise.get(key, 0.0), error)
        if gradients is not None:
            noise |= propagate(recipe, reference, gradients, device, forced=forced)
    return noise


def perturbed_programs(recipe: Recipe, device: torch.device) -> Iterator[Program]:
    """Yield single-device programs that compute the recipe's answer up to rounding.

    The plain one where the precision is not that of the golden; rows in another order; rows in other
    micro-batches; and initial weights off by one unit in the last place.
    """
    if recipe.precision != "float64":
        yield assemble_single(recipe, device)
    rows = list(range(recipe.data.batch))
    random.Random(recipe.seed).shuffle(rows)
    positions = range(recipe.data.seq_len)
    yield assemble_single(recipe, device, share=Share(tuple(rows), positions))
    if can_accumulate(recipe):
        regrouped = assemble_single(recipe, device, share=Share(tuple(reversed(rows)), positions))
        regrouped.num_micro_batches = 2
        yield regrouped
    nudged = assemble_single(recipe, device)
    _nudge(nudged, EPSILON[recipe.precision], recipe.seed)
    yield nudged


def can_accumulate(recipe: Recipe) -> bool:
    """Return whether the recipe's answer does not depend on the micro-batches."""
    if recipe.data.batch % 2:
        return False
    moe = recipe.model.moe
    return moe is None or moe.balance_scope == "sequence" or moe.balance_coef == 0.0


@torch.no_grad()
def _nudge(program: Program, epsilon: float, seed: int) -> None:
    """Move every weight up or down by one unit in the last place of a number of its size."""
    for held in program.shards:
        local = held.local()
        index = held.region.flat_index(device=local.device)
        sign = 1.0 - 2.0 * (hash_counter(key_of(seed, "nudge", held.name), index) & 1).to(torch.float64)
        local.copy_((local.to(torch.float64) * (1.0 + epsilon * sign)).to(local.dtype))


def measure_noise(
    recipe: Recipe,
    program: Program,
    reference: StoredGolden,
    *,
    forced: bool = False,
    gradients: GradientNoise | None = None,
) -> dict[str, float]:
    """Return how far a single-device run is from the golden, for each logical tensor.

    `gradients` keeps how far the gradients are, element by element.
    """
    comparison = Comparison(reference, hash_bits=False)
    observer = comparison if gradients is None else gradients.before(comparison)
    low = recipe.precision != "float64" and bool(program.routers)
    train(recipe, program, observer, golden=reference, replay_routing=low, forced=forced)
    totals: dict[str, Any] = {}
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
    # An expected norm of exactly zero is judged absolutely, so its noise is never asked for.
    return error if error != float("inf") else 0.0


def summarize(recipe: Recipe, golden: StoredGolden) -> dict[str, Any]:
    """Return what the file in git holds: losses and norms of every step, fingerprints of logical tensors."""
    losses: dict[str, float] = {}
    tensors: dict[str, Fingerprint] = {}
    for step in range(INITIAL, recipe.steps):
        for key in golden.keys(step):
            kind, _, name = key.partition("/")
            tensor = golden.whole(step, key)
            if kind in ("loss", "gradient_norm"):
                losses[f"{step}/{kind}/{name}"] = float(f"{tensor.item():.13g}")
            elif _is_filed(step, kind, recipe.steps - 1):
                tensors[f"{step}/{key}"] = fingerprint(tensor)
    return {"losses": losses, "tensors": tensors}


def _is_filed(step: int, kind: str, last: int) -> bool:
    """Return whether the file in git has the fingerprints of this kind at this step."""
    return (
        step == INITIAL or (step == 0 and kind == "gradient") or (step == last and kind in _LAST_STEP_KINDS)
    )
