"""Exchange of experts between two steps: weights and moments move to the ranks of a new placement.

Training continues as if nothing had moved. Values and moments of an expert are copied bit for bit, and its
logical name keeps its number. State that depends on the holders of an expert is rebuilt: process groups for
its gradient, the rows of each shard, and the destinations of tokens.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from moeverify.parallel.move_experts import Journey, move_rows
from moeverify.parallel.placed_experts import PlacedExperts, PlacedLayer, set_placement
from moeverify.parallel.regions.local_shard import parameters
from moeverify.seams import seam
from moeverify.tools.placement.buckets import list_buckets, order_rows
from moeverify.tools.placement.placement import Placement
from moeverify.train.program import TrainingProgram


@seam
def exchange_experts(program: TrainingProgram, optimizer: Optimizer, placement: Placement) -> None:
    """Move every expert and its optimizer state to the ranks of a placement, and rebuild dependent state.

    The exchange is complete on this rank when the function returns. Save checkpoints before or after it.
    Collective: all ranks of the layout, between two steps.
    """
    assert program.holders is not None
    program.holders.make(placement)  # on all ranks, including pipeline stages without experts
    for placed in program.placed or ():
        _exchange_layers(placed, optimizer, placement)
    program.shards = parameters(program.model)
    program.keep_bound()
    program.holders.keep_only(placement)


def _exchange_layers(placed: PlacedExperts, optimizer: Optimizer, placement: Placement) -> None:
    matrices = dict(zip(placement.layers, placement.matrices, strict=True))
    for position, layer in enumerate(placed.layers):
        buckets = list_buckets(matrices[layer.number])
        journey = Journey(order_rows(layer.buckets, layer.num_ranks), order_rows(buckets, layer.num_ranks))
        _move_layer(layer, journey, optimizer)
        placed.layers[position] = set_placement(layer, buckets, placement.num_experts)


def _move_layer(layer: PlacedLayer, journey: Journey, optimizer: Optimizer) -> None:
    """Send the rows of each parameter and its moments; register the new tensors in module and optimizer."""
    experts = layer.moe.experts
    for name, old in list(experts.named_parameters(recurse=False)):
        state = optimizer.state.pop(old, {})
        # A step counter belongs to the parameter, not to an expert. It is equal on all ranks and stays.
        rows = {key: value for key, value in state.items() if _has_rows(value, old)}
        weight, *moments = move_rows([old.detach(), *rows.values()], journey, layer.group)
        new = nn.Parameter(weight, requires_grad=old.requires_grad)
        experts.register_parameter(name, new)
        replace_parameter(optimizer, old, new)
        if state:
            optimizer.state[new] = {**state, **dict(zip(rows, moments, strict=True))}


def _has_rows(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


@seam
def replace_parameter(optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    """Replace a parameter in the groups of an optimizer by another one."""
    for group in optimizer.param_groups:
        group["params"] = [new if each is old else each for each in group["params"]]
