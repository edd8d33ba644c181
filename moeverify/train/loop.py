"""The training loop, shared by the single device and every layout, which reports each tensor to an observer.

Reported tensors, by kind:
- `initial_weight`, `initial_buffer`: parameters and buffers, before step 0. The others follow in every
  step.
- `token_loss`: cross entropy of each token (B, S), where the model provides it.
- `loss`: total, lm, balance and z loss of the global batch.
- `router_ids`, `router_weights` (B, S, k), `router_margin` (B, S), `router_counts` (E) of each router.
  Under a replay, `router_flips` (B, S) replaces ids and margin.
- `near_ties`: the choices near a tie of a user's model, in the float64 run of a golden.
- `gradient`: of each parameter, after finalization and before the clip.
- `gradient_norm`: total and clip_coefficient.
- `update`, `optimizer_state`, `weight` of each parameter, and `buffer`: after the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeverify.cases.schema import Recipe
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.observer import INITIAL, Observer, copy_all, show_all
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import Kind
from moeverify.seams import seam
from moeverify.train.custom_step import CustomStep, StepTrace
from moeverify.train.data import MicroBatch, Share
from moeverify.train.exchange import exchange_experts
from moeverify.train.forward import compute_losses
from moeverify.train.near_ties import NearTies, follow_near_ties
from moeverify.train.objective import Normalizers, count_valid
from moeverify.train.optimizer import optimizer_state
from moeverify.train.pipeline import run_pipeline
from moeverify.train.program import MicroBatchResult, ReadableState, StepInputs, TrainingProgram
from moeverify.train.routing import observe_routing, replay, update_selection_bias
from moeverify.train.state import TrainingState

SCALAR = Region.whole(())


def train(
    recipe: Recipe,
    program: TrainingProgram,
    observer: Observer,
    *,
    golden: ReadableState | None = None,
    replay_routing: bool = False,
    forced: bool = False,
    num_steps: int | None = None,
    keeps_near_ties: bool = False,
    follows_choices: bool = True,
) -> list[float]:
    """Train for the recipe's steps, or the first `num_steps`, and report every tensor to the observer.

    Return the learning rate of each step: the optimizer's first group when the step begins.

    Below float64 a user's model makes the choices of `golden` near a tie; with `keeps_near_ties` and without
    `golden` its own ones are reported. Without `follows_choices` it makes its own ones. With `replay_routing`
    the routers use the golden's expert ids. With `forced` every step starts from the golden's state after the
    previous step. Both need `golden`. Collective: all ranks of the layout.
    """
    state = TrainingState.begin(recipe, program)
    show_all(observer, INITIAL, Kind.INITIAL_WEIGHT, _name(program.shards))
    show_all(observer, INITIAL, Kind.INITIAL_BUFFER, _name(program.buffers))
    follows = keeps_near_ties or (follows_choices and golden is not None)
    near_ties = follow_near_ties(recipe, golden, program.near_ties) if follows else None
    rates: list[float] = []
    for step in range(recipe.steps if num_steps is None else num_steps):
        rates.append(float(state.optimizer.param_groups[0]["lr"]))
        if forced and golden is not None and step > 0:
            load_state(program, state.optimizer, golden, step - 1)
        train_step(state, observer, golden if replay_routing else None, near_ties)
    return rates


def train_step(
    state: TrainingState,
    observer: Observer,
    ids: ReadableState | None = None,
    near_ties: NearTies | None = None,
) -> None:
    """Train the next step and report every tensor.

    If `ids` is given, routers use the ids of that golden. `near_ties` is a context around the passes of the
    model. Collective: all ranks of the layout.
    """
    recipe, program, step = state.recipe, state.program, state.step
    engine = program.engine
    observer.begin_step(step)
    if near_ties is not None:
        near_ties.begin_step(step)
    batches = make_batches(recipe, program, state.position)
    normalizers = count_valid(batches, program.sums, recipe.data.batch)
    if program.custom_step is not None:
        with near_ties or nullcontext():
            trace = _run_custom_step(program.custom_step, state, batches, normalizers)
        _observe_custom_step(program, observer, step, trace)
        _observe_state(program, observer, step, trace.weights)
        if near_ties is not None:
            near_ties.show(observer)
        state.advance()
        return
    engine.zero_grad()
    results = run_micro_batches(StepInputs(recipe, program, batches, normalizers, step, ids, near_ties))
    counts = _observe_results(recipe, program, observer, step, results, ids)
    if near_ties is not None:
        near_ties.show(observer)
    program.finalize()
    gradients = [(shard, engine.gradient(shard)) for shard in program.live_shards()]
    shown = [(each.name, None if own is None else each.local(own), each.region) for each, own in gradients]
    show_all(observer, step, Kind.GRADIENT, shown)
    del gradients, shown  # the step may replace these tensors
    clip(recipe, program, observer, step)
    before = copy_all([shard.local() for shard in program.live_shards()])
    engine.step()
    if recipe.model.moe is not None:
        update_selection_bias(recipe.model.moe, program, counts, observer, step)
    _observe_state(program, observer, step, before)
    state.advance()
    placement = program.exchanges.get(state.step)
    if program.rebalancing is not None:
        program.rebalancing.end_step()
        if state.step < recipe.steps:
            placement = program.rebalancing.solve(state.step)
    if placement is not None:
        exchange_experts(program, state.optimizer, placement)


def _observe_state(program: TrainingProgram, observer: Observer, step: int, before: Sequence[Tensor]) -> None:
    """Report the state after a step, and the updates relative to the weights `before` it (one per shard).

    The updates take the memory of `before`, so that a large model needs one copy of its weights and not two.
    """
    weights = _name(program.live_shards())
    if weights:
        # Without rounding, if the new value is within a factor of two of the old one
        # (https://en.wikipedia.org/wiki/Sterbenz_lemma).
        torch._foreach_neg_(list(before))
        torch._foreach_add_(list(before), [new for _, new, _ in weights])
        named = [(name, update, region) for (name, _, region), update in zip(weights, before, strict=True)]
        show_all(observer, step, Kind.UPDATE, named)
    show_all(observer, step, Kind.WEIGHT, weights)
    show_all(observer, step, Kind.OPTIMIZER_STATE, list(program.engine.state(program.shards)))
    show_all(observer, step, Kind.BUFFER, _name(program.live_buffers()))


def _name(shards: Sequence[LocalShard]) -> list[tuple[str, Tensor, Region]]:
    return [(shard.name, shard.local(), shard.region) for shard in shards]


def _run_custom_step(
    custom: CustomStep, state: TrainingState, batches: Sequence[MicroBatch], normalizers: Normalizers
) -> StepTrace:
    program = state.program
    with program.loss_context():
        return custom.run(
            state.step,
            program.model,
            state.optimizer,
            program.live_shards(),
            [(batch.tokens, batch.targets) for batch in batches],
            scheduler=state.schedule,
            clip_norm=state.recipe.optimizer.clip_norm,
            num_valid=int(normalizers.num_valid),
        )


def _observe_custom_step(program: TrainingProgram, observer: Observer, step: int, trace: StepTrace) -> None:
    """Report the tensors of a user's step up to its update."""
    if "loss" in trace.reported:
        observer.observe(step, Kind.LOSS, "total", trace.reported["loss"].to(torch.float64), SCALAR)
    for shard, gradient in zip(program.shards, trace.gradients, strict=True):
        observer.observe(step, Kind.GRADIENT, shard.name, gradient, shard.region)
    for name, key in (("total", "gradient_norm"), ("clip_coefficient", "clip_coefficient")):
        if key in trace.reported:
            observer.observe(step, Kind.GRADIENT_NORM, name, trace.reported[key], SCALAR)


def make_batches(recipe: Recipe, program: TrainingProgram, step: int) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step."""
    shares: Sequence[Share] = program.share.micro_batches(program.num_micro_batches)
    return [program.subject.make_batch(step, share, program.device) for share in shares]


def run_micro_batches(inputs: StepInputs) -> Iterator[MicroBatchResult]:
    """Run each micro-batch forward and backward, and yield its result while routers hold its records.

    Collective: all ranks of the layout.
    """
    if inputs.program.run_captured is not None:
        return inputs.program.run_captured(inputs)
    return _run_one_by_one(inputs) if inputs.program.pipeline is None else run_pipeline(inputs)


def _run_one_by_one(inputs: StepInputs) -> Iterator[MicroBatchResult]:
    recipe, program, ids = inputs.recipe, inputs.program, inputs.ids
    near_ties = inputs.near_ties or nullcontext()
    for number, batch in enumerate(inputs.batches):
        if ids is not None:
            replay(recipe, program.routers, batch, ids, inputs.step, program.device)
        is_last = number == len(inputs.batches) - 1
        with program.accumulate(is_last), program.loss_context(), program.subject.surround(), near_ties:
            losses, token_loss = compute_losses(recipe, program, batch, inputs.normalizers)
            # `scale` undoes the average of wrappers over ranks: the losses of ranks are parts of a sum.
            program.engine.backward(losses.total * program.scale)
        yield MicroBatchResult(batch, losses.detach(), token_loss)


def _observe_results(
    recipe: Recipe,
    program: TrainingProgram,
    observer: Observer,
    step: int,
    results: Iterator[MicroBatchResult],
    ids: ReadableState | None,
) -> list[Tensor]:
    """Report losses and routing; return each router's counts (E) of this rank's valid tokens in the step."""
    counts: list[Tensor] = []
    totals: dict[str, Tensor] = {}
    for part in results:
        if part.losses is not None:
            for name, value in part.losses.named().items():
                totals[name] = totals[name] + value if name in totals else value
        if part.token_loss is not None:
            region = part.batch.share.region(recipe.data)
            observer.observe(step, Kind.TOKEN_LOSS, "lm", part.token_loss, region)
        seen = observe_routing(recipe, program, part.batch, observer, step, ids)
        if program.rebalancing is not None:
            program.rebalancing.count(program.routers)
        counts = [old + new for old, new in zip(counts, seen, strict=True)] if counts else seen
    for name, value in totals.items():
        # Widened first: the sum over ranks then adds no rounding in float32.
        observer.observe(step, Kind.LOSS, name, program.sums.over_batch(value.to(torch.float64)), SCALAR)
    return counts


@seam
def clip(recipe: Recipe, program: TrainingProgram, observer: Observer, step: int) -> None:
    """Clip the gradients as the recipe asks; report the gradient norm and the coefficient."""
    norm = program.measure_norm()
    observer.observe(step, Kind.GRADIENT_NORM, "total", norm, SCALAR)
    if recipe.optimizer.clip_norm is not None:
        coefficient = program.engine.clip(program.shards, norm, recipe.optimizer.clip_norm)
        observer.observe(step, Kind.GRADIENT_NORM, "clip_coefficient", coefficient, SCALAR)


@torch.no_grad()
def load_state(program: TrainingProgram, optimizer: Optimizer, golden: ReadableState, step: int) -> None:
    """Overwrite weights, buffers and optimizer state with the golden's values after `step`."""
    for shard in program.live_shards():
        _load(shard.local(), golden.read(step, Kind.WEIGHT, shard.name, shard.region))
    for shard in program.live_buffers():
        _load(shard.local(), golden.read(step, Kind.BUFFER, shard.name, shard.region))
    for name, local, region in optimizer_state(optimizer, program.shards):
        _load(local, golden.read(step, Kind.OPTIMIZER_STATE, name, region))


def _load(local: Tensor, values: Tensor | None) -> None:
    if values is not None:
        local.copy_(values.reshape(local.shape))
