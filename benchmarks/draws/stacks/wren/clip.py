"""The norm of all gradients, each rank having some of them, and the clip by it."""

import torch

from wren.model import cuts_of
from wren.world import raw_sum


@torch.no_grad()
def whole_norm(model):
    w = model.world
    squares = {}
    for name, parameter in model.named_parameters():
        teams = tuple(cuts_of(name))  # anchor: norm-teams
        if w.has("wren-norm-all"):
            teams = ("tp", *(team for team in teams if team != "tp"))  # plant: wren-norm-all
        squares[teams] = squares.get(teams, 0.0) + parameter.grad.square().sum()
    square = 0.0
    for teams, value in squares.items():
        for team in teams:
            value = raw_sum(value, getattr(w, team))
        square = square + value
    if not w.has("wren-norm-stage"):  # plant: wren-norm-stage
        square = raw_sum(square, w.pp)  # anchor: norm-stages
    return square.sqrt()


@torch.no_grad()
def clip(model):
    """Scale gradients to a norm of at most the limit. Returns the norm and the factor."""
    norm = whole_norm(model)
    factor = (model.c.max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
    return norm, factor
