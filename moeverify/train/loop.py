"""The training loop: the same for a single device and for every layout, with everything shown to an observer.

What is shown, as (kind: names): `initial_weight` and `initial_buffer`: parameters and buffers, before step 0;
then for every step `token_loss`: the cross entropy of each token (B, S), where the model gives it; `loss`:
total, lm, balance, z of the global batch; `router_ids`, `router_weights` (B, S, k), `router_margin` (B, S)
and `router_counts` (E) of each router, under a replay `router_flips` (B, S) in place of ids and margin;
`gradient` of each parameter after finalization and before the clip; `gradient_norm`: total,
clip_coefficient; `update`, `optimizer_state` and `weight` of each parameter and `buffer` after the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.case.schema import CustomModel, Recipe
from moeverify.layout.observer import INITIAL, Observer
from moeverify.layout.region import Region
from moeverify.seams import seam
from moeverify.train.clipping import clip_gradients, gradient_norm
from moeverify.train.data import Batch, Share, make_batch
from moeverify.train.forward import compute_losses
from moeverify.train.objective import Normalizers, count_valid
from moeverify.train.optimizer import optimizer_state
from moeverify.train.pipeline import run_pipeline
from moeverify.train.program import Passed, Program, Source
from moeverify.train.routing import observe_routing, replay, update_selection_bias
from moeverify.train.state import TrainingState

SCALAR = Region.whole(())


def train(
    recipe: Recipe,
    program: Program,
    observer: Observer,
    *,
    golden: Source | None = None,
    replay_routing: bool = False,
    forced: bool = False,
    num_steps: int | None = None,
) -> None:
    """Train for the recipe's steps, or the first `num_steps` of them, and show everything to the observer.

    With `replay_routing` the routers use the golden's ids; with `forced` every step starts from the golden's
    state after the step before. Both need `golden`. Collective: all ranks of the layout.
    """
    state = TrainingState.begin(recipe, program)
    for held in program.holdings:
        observer.observe(INITIAL, "initial_weight", held.name, held.local(), held.region)
    for held in program.buffers:
        observer.observe(INITIAL, "initial_buffer", held.name, held.local(), held.region)
    for step in range(recipe.steps if num_steps is None else num_steps):
        if forced and golden is not None and step > 0:
            load_state(program, state.optimizer, golden, step - 1)
        train_step(state, observer, golden if replay_routing else None)


def train_step(state: TrainingState, observer: Observer, ids: Source | None = None) -> None:
    """Train the next step and show everything to the observer; with `ids` the routers use those of a golden.

    Collective: all ranks of the layout.
    """
    recipe, program, optimizer, step = state.recipe, state.program, state.optimizer, state.step
    observer.begin_step(step)
    batches = make_batches(recipe, program, state.position)
    normalizers = count_valid(batches, program.sums, recipe.data.batch)
    optimizer.zero_grad(set_to_none=True)
    run = accumulate_gradients if program.pipeline is None else run_pipeline
    passed = run(recipe, program, batches, normalizers, step, ids)
    counts = _observe_passes(recipe, program, observer, step, passed, ids)
    program.finalize()
    for held in program.holdings:
        gradient = held.tensor.grad
        local = None if gradient is None else held.local(gradient)
        observer.observe(step, "gradient", held.name, local, held.region)
    clip(recipe, program, observer, step)
    before = [held.local().clone() for held in program.holdings]
    optimizer.step()
    if not isinstance(recipe.model, CustomModel) and recipe.model.moe is not None:
        update_selection_bias(recipe.model.moe, program, counts, observer, step)
    for held, old in zip(program.holdings, before, strict=True):
        new = held.local()
        observer.observe(step, "update", held.name, new - old, held.region)
        observer.observe(step, "weight", held.name, new, held.region)
    for name, local, region in optimizer_state(optimizer, program.holdings):
        observer.observe(step, "optimizer_state", name, local, region)
    for held in program.buffers:
        observer.observe(step, "buffer", held.name, held.local(), held.region)
    state.advance()


def make_batches(recipe: Recipe, program: Program, step: int) -> list[Batch]:
    """Return this rank's micro-batches of a step."""
    shares: Sequence[Share] = program.share.micro_batches(program.num_micro_batches)
    return [
        make_batch(recipe.data, recipe.model.vocab_size, recipe.seed, step, share, program.device)
        for share in shares
    ]


def accumulate_gradients(
    recipe: Recipe,
    program: Program,
    batches: Sequence[Batch],
    normalizers: Normalizers,
    step: int,
    ids: Source | None,
) -> Iterator[Passed]:
    """Run each micro-batch forward and backward and yield it while the routers hold its records."""
    for number, batch in enumerate(batches):
        if ids is not None:
            replay(recipe, program.routers, batch, ids, step, program.device)
        with program.accumulate(number == len(batches) - 1), program.loss_context():
            losses, token_loss = compute_losses(recipe, program, batch, normalizers)
            torch.autograd.backward(losses.total * program.scale)
        yield Passed(batch, losses.detach(), token_loss)


def _observe_passes(
    recipe: Recipe,
    program: Program,
    observer: Observer,
    step: int,
    passed: Iterator[Passed],
    ids: Source | None,
) -> list[Tensor]:
    """Return, for each router, how many valid tokens of this rank each expert got in this step, (E)."""
    counts: list[Tensor] = []
    totals: dict[str, Tensor] = {}
    for part in passed:
        if part.losses is not None:
            for name, value in part.losses.named().items():
                totals[name] = totals[name] + value if name in totals else value
        if part.token_loss is not None:
            region = part.batch.share.region(recipe.data)
            observer.observe(step, "token_loss", "lm", part.token_loss, region)
        seen = observe_routing(recipe, program, part.batch, observer, step, ids)
        counts = [old + new for old, new in zip(counts, seen, strict=True)] if counts else seen
    for name, value in totals.items():
        observer.observe(step, "loss", name, program.sums.over_batch(value.to(torch.float64)), SCALAR)
    return counts


@seam
def clip(recipe: Recipe, program: Program, observer: Observer, step: int) -> None:
    """Scale the gradients by the recipe's clip; show the gradient norm and the coefficient to the observer."""
    counted = program.holdings if program.counted is None else program.counted
    norm = gradient_norm(counted, program.sum_over_shards, program.sum_over_stages)
    observer.observe(step, "gradient_norm", "total", norm, SCALAR)
    if recipe.optimizer.clip_norm is not None:
        coefficient = clip_gradients(program.holdings, norm, recipe.optimizer.clip_norm)
        observer.observe(step, "gradient_norm", "clip_coefficient", coefficient, SCALAR)


@torch.no_grad()
def load_state(program: Program, optimizer: Optimizer, golden: Source, step: int) -> None:
    """Overwrite weights, buffers and optimizer state with the golden's after `step`, region by region."""
    for held in program.holdings:
        _load(held.local(), golden.read(step, "weight", held.name, held.region))
    for held in program.buffers:
        _load(held.local(), golden.read(step, "buffer", held.name, held.region))
    for name, local, region in optimizer_state(optimizer, program.holdings):
        _load(local, golden.read(step, "optimizer_state", name, region))


def _load(local: Tensor, values: Tensor | None) -> None:
    if values is not None:
        local.copy_(values.reshape(local.shape))
