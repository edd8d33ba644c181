"""One part of a model whose whole does not fit the device: a layer, or the embedding with the head.

A unit never outlives a visit. Each visit draws its parameters again from the seed. It recomputes its state
after some steps from the stored activations and gradients at its ends (`replay`). A golden therefore needs
the memory of one layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeverify.cases.schema import Precision, Recipe, ReferenceModel
from moeverify.hashing import hash_counter, key_of
from moeverify.model.init import fill
from moeverify.model.mixed_precision import narrow_model
from moeverify.model.transformer import Transformer
from moeverify.parallel.regions.local_shard import buffers, parameters
from moeverify.parallel.regions.observer import Observer
from moeverify.results.checks import Kind
from moeverify.train.assemble import fill_initial
from moeverify.train.clipping import clip_gradients
from moeverify.train.data import whole_share
from moeverify.train.optimizer import optimizer_state
from moeverify.train.program import TrainingProgram, compute_dtype_of, dtype_of
from moeverify.train.routers import find_routers
from moeverify.train.routing import update_selection_bias
from moeverify.train.state import TrainingState
from moeverify.train.subjects import subject_of

ENDS = -1
"""The number of the unit with the embedding, the last norm and the head."""


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a streamed run; `nudge` moves every initial weight by that fraction of itself."""

    compute: Precision
    nudge: float = 0.0


class Unit:
    """The parameters of one layer, or of both ends, with the optimizer's state for them."""

    def __init__(self, recipe: Recipe, layer: int, numerics: Numerics, device: torch.device) -> None:
        spec = recipe.model.reference
        assert spec is not None
        dtype = dtype_of(numerics.compute)
        stage = Transformer(spec, dtype=dtype, device="meta")
        for name in list(stage.layers):
            if int(name) != layer:
                del stage.layers[name]
        if layer != ENDS:
            stage.embed, stage.norm, stage.lm_head = None, None, None
        stage.to_empty(device=device)
        _fill(recipe, spec, stage, numerics.nudge)
        self.stage = stage
        if compute_dtype_of(numerics.compute) != dtype:
            narrow_model(stage, compute_dtype_of(numerics.compute))
        self.program = TrainingProgram(
            subject=subject_of(recipe),
            model=stage,
            shards=parameters(stage),
            buffers=buffers(stage),
            routers=find_routers(stage),
            share=whole_share(recipe.data),
            device=device,
            optimizer_implementation="loop",  # `foreach` has temporaries of the size of all parameters
        )
        self.state = TrainingState.begin(recipe, self.program)

    def embedding(self) -> nn.Module:
        """Return the module from tokens to hidden states, with the parameters of this unit."""
        return _without(self.stage, "norm", "lm_head")

    def show_initial(self, observer: Observer, step: int) -> None:
        """Show the parameters and buffers before the first step."""
        for shard in self.program.shards:
            observer.observe(step, Kind.INITIAL_WEIGHT, shard.name, shard.local(), shard.region)
        for shard in self.program.buffers:
            observer.observe(step, Kind.INITIAL_BUFFER, shard.name, shard.local(), shard.region)

    def show_gradients(self, observer: Observer, step: int) -> Tensor:
        """Show the gradients, and return the sum of their squares: () float64."""
        total = torch.zeros((), dtype=torch.float64)
        for shard in self.program.shards:
            own = shard.tensor.grad
            observer.observe(step, Kind.GRADIENT, shard.name, own, shard.region)
            if own is not None:
                total += torch.linalg.vector_norm(own, dtype=torch.float64).square().cpu()
        return total

    def update(self, norm: Tensor, counts: Sequence[Tensor], observer: Observer) -> None:
        """Clip by the norm of all gradients, step parameter by parameter, and show the results."""
        recipe, program, step = self.state.recipe, self.program, self.state.step
        if recipe.optimizer.clip_norm is not None:
            clip_gradients(program.shards, norm.to(program.device), recipe.optimizer.clip_norm)
        gradients = [shard.tensor.grad for shard in program.shards]
        for shard in program.shards:
            shard.tensor.grad = None
        for number, shard in enumerate(program.shards):
            shard.tensor.grad, gradients[number] = gradients[number], None
            before = shard.local().clone()
            self.state.optimizer.step()
            shard.tensor.grad = None
            observer.observe(step, Kind.UPDATE, shard.name, shard.local() - before, shard.region)
        for name, local, region in optimizer_state(self.state.optimizer, program.shards):
            observer.observe(step, Kind.OPTIMIZER_STATE, name, local, region)
        if recipe.model.moe is not None:
            update_selection_bias(recipe.model.moe, program, counts, observer, step)
        for shard in program.buffers:
            observer.observe(step, Kind.BUFFER, shard.name, shard.local(), shard.region)
        self.state.advance()


def _without(stage: Transformer, *names: str) -> Transformer:
    """Return a stage that shares its modules with another, without some of them."""
    part = copy.copy(stage)
    part._modules = dict(stage._modules)
    for name in names:
        part._modules[name] = None
    return part


@torch.no_grad()
def _fill(recipe: Recipe, spec: ReferenceModel, stage: Transformer, nudge: float) -> None:
    """Fill the parameters as `fill_initial` does, chunk by chunk, and move them by a fraction of themselves."""
    if spec.weights is not None:
        fill_initial(recipe, stage)
    for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
        if spec.weights is None:
            fill(tensor, spec, recipe.seed, name, dtype_of(recipe.precision))
        if nudge and isinstance(tensor, nn.Parameter):
            _nudge(tensor.view(-1), nudge, key_of(recipe.seed, "nudge", name))


def _nudge(flat: Tensor, nudge: float, key: int) -> None:
    step = 1 << 22
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        place = torch.arange(start, start + len(part), device=flat.device)
        sign = 1.0 - 2.0 * (hash_counter(key, place) & 1).to(torch.float64)
        part.copy_((part.to(torch.float64) * (1.0 + nudge * sign)).to(part.dtype))
