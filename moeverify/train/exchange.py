"""The exchange of experts between two steps: weights and moments go where a new placement wants them.

Training goes on as if nothing had moved: an expert's values are copied bit for bit, its moments with them, and its
name in the model stays its number. What depends on who holds an expert is made anew: the groups that its gradient is
summed over, the rows of each shard, and where tokens are sent.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from moeverify.layout.local_shard import parameters
from moeverify.parallel.move_experts import Journey, move_rows
from moeverify.parallel.placed_experts import PlacedExperts, PlacedLayer, set_placement
from moeverify.placement.buckets import list_buckets, order_rows
from moeverify.placement.placement import Placement
from moeverify.seams import seam
from moeverify.train.program import Program


@seam
def exchange_experts(program: Program, optimizer: Optimizer, placement: Placement) -> None:
    """Bring every expert, with its optimizer state, to the ranks of a placement, and rebuild what depends on it.

    When it returns it is complete on this rank; a checkpoint is saved before or after. Collective: all ranks of the
    layout, between two steps.
    """
    assert program.holders is not None
    program.holders.make(placement)  # on all ranks, also in a pipeline stage without experts
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
    """Send the rows of each parameter and of its moments, and let module and optimizer have the new ones."""
    experts = layer.moe.experts
    for name, old in list(experts.named_parameters(recurse=False)):
        state = optimizer.state.pop(old, {})
        # A step counter is the parameter's, not an expert's: it is the same on all ranks, and stays.
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
    """Put a parameter into the place that another one has in the groups of an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [new if each is old else each for each in group["params"]]
