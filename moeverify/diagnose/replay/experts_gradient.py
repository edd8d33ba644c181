"""What routed experts pass back: to their tokens, and to the weights by which their outputs are combined.

Letters as in `moeverify.diagnose.replay.experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from moeverify.diagnose.replay.activations import list_derivatives, list_gradients_inside
from moeverify.diagnose.replay.counts import NO_EXPERT
from moeverify.diagnose.replay.counts import PART as COUNTS
from moeverify.diagnose.replay.exchange import AFTER, iterate_parts
from moeverify.diagnose.replay.experts import ExpertsFormula
from moeverify.diagnose.replay.gradient_ways import (
    GRADIENT_OF,
    change_gradient,
    list_edge_ways,
    needs_call,
)
from moeverify.diagnose.replay.language import Cell, Formula
from moeverify.diagnose.replay.tokenwise import pull_back
from moeverify.results.change import Change

# What changes nothing of a choice's own output, or is nothing that ranks do to weights alone.
_NOT_OF_WEIGHTS = ("input", "weights", "activation", "gate", "input-through", "output-through")


class ExpertsGradientFormula(Formula):
    """What the routed experts pass back to their tokens (b, s, H), from the gradient (B, S, H) of their sum.

    In the backward pass alone a step of the way may be otherwise: of those after the experts it is what comes in, of
    those before them what goes out.
    """

    has_pairs = False  # each is a backward pass

    def __init__(self, forward: ExpertsFormula, gradient: Tensor) -> None:
        self.forward, self.gradient = forward, gradient
        self.ways = [
            *list_derivatives(has_gate=True),
            *list_gradients_inside("gate", "up", over_tokens=False),
        ]
        self.ways += list_edge_ways("rows", "outputs", over_tokens=False)
        self.ways += [
            way for way in forward.ways if not way.part.startswith("input") and way.part != "output-through"
        ]
        self.fits = [fit for fit in forward.fits if not fit.part.endswith("-through")]
        # What a gradient inside has otherwise in one place alone costs as much as all others.
        self.places, self.alone = forward.places, forward.alone | {GRADIENT_OF, "derivative"}

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell."""
        step = next(iterate_parts(changes), None)
        if step is not None:
            whole = self._travel_back(step)[cell.rows][:, cell.positions]
            return whole[..., cell.dims[-1]]
        x, given = (each[cell.rows][:, cell.positions] for each in (self.forward.x, self.gradient))
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            output = self.forward.compute(leaf, cell, changes)
            found = pull_back(output, leaf, given)
        return found[..., cell.dims[-1]]

    def _travel_back(self, step: Change) -> Tensor:
        """Return the gradient of all tokens (B, S, H) where rows of gradients stand in the places of others."""
        forward = self.forward
        found = forward.exchanges.travel(step)
        given = forward.weights.unsqueeze(-1) * self.gradient.unsqueeze(2)
        flat = given.flatten(0, 2)
        is_after = step.part in (*AFTER, "back", "restored")
        if is_after:
            flat = torch.zeros_like(flat).index_add(0, found.copies, flat)
        ones = torch.ones(forward.held.gate.shape[1], dtype=forward.x.dtype)
        experts = found.experts if step.part == COUNTS else forward.ids.flatten()
        flat = flat * (experts != NO_EXPERT).unsqueeze(-1)
        with torch.enable_grad():
            rows = forward.x.unsqueeze(2).expand(*forward.ids.shape, forward.x.shape[-1])
            leaf = rows.clone().requires_grad_()
            output, _ = forward.run(leaf, experts.clamp(min=0).view(forward.ids.shape), {}, ones)
            (passed,) = torch.autograd.grad(output, leaf, flat.view_as(output))
        tokens = torch.arange(forward.ids.numel()) if is_after else found.copies
        whole = torch.zeros_like(forward.x).flatten(0, 1)
        return whole.index_add(0, tokens // forward.num_choices, passed.flatten(0, 2)).view_as(forward.x)


class CombineGradientFormula(Formula):
    """What the routed experts pass back to their weights (b, s, k): the gradient times each choice's output."""

    has_pairs = False

    def __init__(self, forward: ExpertsFormula, gradient: Tensor) -> None:
        self.forward, self.gradient = forward, gradient
        self.ways = [way for way in forward.ways if way.part not in _NOT_OF_WEIGHTS]
        self.ways.append(Change(part="weights", way="reversed"))
        self.ways += list_edge_ways("combine", operands=("combine",))
        self.fits = [Change(part="all", way="times", number=number) for number in (0.5, 2.0)]
        self.places, self.alone = forward.places, forward.alone

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell."""
        asked = cell.of_call() if needs_call(changes) else cell
        x, given = (each[asked.rows][:, asked.positions] for each in (self.forward.x, self.gradient))
        with torch.enable_grad():
            inner = copy(self.forward)
            inner.weights = self.forward.weights.detach().clone().requires_grad_()
            forward = {part: change for part, change in changes.items() if part not in ("weights", "all")}
            output = inner.compute(x, asked, forward)
            whole = pull_back(output, inner.weights, given)
        found = whole[asked.rows][:, asked.positions]
        if own := changes.get(f"{GRADIENT_OF}:combine"):
            weights = self.forward.weights[asked.rows][:, asked.positions]
            found = change_gradient(found, own, {"combine": weights})
        found = found.flip(-1) if "weights" in changes else found
        found = found * (changes["all"].number or 1.0) if "all" in changes else found
        return (found if asked is cell else cell.pick_from_call(found))[..., cell.dims[-1]]
