"""What is computed token by token: norms, linear layers, the inside of a feed-forward block, sums of branches.

Letters: b rows and s tokens of what is asked for, H width of what goes in, F of what comes out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Literal

import torch
from torch import Tensor, nn

from moeverify.diagnose.replay.activations import (
    activate,
    fit_activations,
    list_activations,
    list_derivatives,
    list_gradients_inside,
)
from moeverify.diagnose.replay.gradient_ways import list_edge_ways, needs_call, weigh_gradient
from moeverify.diagnose.replay.grammar import (
    fit_functions,
    fit_gradients,
    fit_terms,
    list_functions,
    list_terms,
    pass_through,
    times_of,
)
from moeverify.diagnose.replay.language import Cell, Formula, draw_like
from moeverify.model.router import Router
from moeverify.results.change import Change

Named = Mapping[str, Tensor]

ORDERS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "next-slice": lambda at, size: at.view(size, -1).roll(-1, 0).flatten(),
    "slices-reversed": lambda at, size: at.view(size, -1).flip(0).flatten(),
    "first-slice": lambda at, size: at.view(size, -1)[:1].expand(size, -1).flatten(),
    "in-turn": lambda at, size: at.view(-1, size).T.flatten(),
}
"""Other orders of what ranks hold slices of, by what stands at each of so many places: (width), number of slices."""

MOST_PARTS = 16


def list_orders(size: int) -> list[str]:
    """Return the orders of so many slices that differ: of two the next one is the other."""
    return [way for way in ORDERS if size > 2 or way != "next-slice"]


class TokenFormula(Formula):
    """What a module makes of each token of its input (B, S, H). `others` are tensors of that shape, by module.

    `edges` are the tensors inside whose gradients may count otherwise where a module passes back (`weigh_gradient`),
    and `backward` are all ways of the backward pass alone.
    """

    alone = frozenset({"input-through", "output-through"})
    edges: Sequence[str] = ()
    backward: Sequence[Change] = ()

    def __init__(self, x: Tensor, others: Named) -> None:
        self.x, self.others = x, others
        moves = [("of-position", 1), ("of-position", -1), ("of-row", 1), ("of-row", -1)]
        self.ways = [
            *(Change(part="input", way=way, number=number) for way, number in moves),
            *(Change(part="input", way="of-module", name=name) for name in others),
            *list_functions("input-through"),
            *list_functions("output-through"),
        ]
        self.fits: list[Change] = [*fit_functions("output-through"), *fit_functions("input-through")]

    @abstractmethod
    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return (b, s, F) for the tokens x (b, s, H) of a cell."""

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the output at a cell."""
        change, (rows, positions) = changes.get("input"), (cell.rows, cell.positions)
        x, (num_rows, length) = self.x, self.x.shape[:2]
        if change is not None and change.way == "of-module":
            x = self.others[change.name]
        elif change is not None and change.way == "of-row":
            rows = (rows + int(change.number or 0)) % num_rows
        elif change is not None:
            positions = (positions + int(change.number or 0)) % length
        came_in = pass_through(x[rows][:, positions], changes.get("input-through"))
        return pick_dims(self.finish(self.compute(came_in, cell, changes), changes), cell)

    def redraw(self) -> Formula | None:
        """Return the same formula of other tokens."""
        other = copy(self)
        other.x = draw_like(self.x)
        other.others = {name: draw_like(value, 2 + n) for n, (name, value) in enumerate(self.others.items())}
        return other

    def finish(self, output: Tensor, changes: Mapping[str, Change]) -> Tensor:
        """Return an output (b, s, F) as it comes out of what it has passed through besides."""
        return pass_through(output, changes.get("output-through"))


def pick_dims(whole: Tensor, cell: Cell) -> Tensor:
    """Return what a cell has of the dims after rows and positions, such as the heads of a rank."""
    for dim, indices in enumerate(cell.dims, 2):
        whole = whole if whole.shape[dim] == len(indices) else whole.index_select(dim, indices)
    return whole


class LinearFormula(TokenFormula):
    """x W^T + bias."""

    def __init__(self, module: nn.Linear | Router, x: Tensor, others: Named, weights: Named) -> None:
        super().__init__(x, others)
        self.weight, self.weights = module.weight.detach(), weights
        self.bias = None if module.bias is None else module.bias.detach()
        ways = []
        if self.bias is not None:
            ways += list_terms("bias")
            self.fits = [*fit_terms("bias"), *self.fits]
        if self.weight.shape[0] == self.weight.shape[1]:
            ways.append(Change(part="weight", way="transposed"))
        ways += [Change(part="weight", way="of-module", name=name) for name in weights]
        for part, width in zip(("rows", "columns"), self.weight.shape, strict=True):
            sizes = [n for n in range(2, MOST_PARTS + 1) if width % n == 0]
            ways += [Change(part=part, way=way, number=n) for n in sizes for way in list_orders(n)]
        self.ways = [*ways, *self.ways]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the product of each token."""
        del cell
        change, weight = changes.get("weight"), self.weight
        if change is not None:
            weight = self.weights[change.name] if change.name else weight.T
        for dim, part in enumerate(("rows", "columns")):
            if part in changes:
                order = ORDERS[changes[part].way](
                    torch.arange(weight.shape[dim]), int(changes[part].number or 1)
                )
                weight = weight.index_select(dim, order)
        product = x @ weight.T
        return product if self.bias is None else product + self.bias * times_of(changes.get("bias"))


class GatedFormula(TokenFormula):
    """silu(gate) * up, or gelu(up) without a gate: what goes into the last product of a feed-forward block."""

    most_paired = 32  # as cheap as a formula can be

    def __init__(self, gate: Tensor | None, up: Tensor, biases: Named | None = None) -> None:
        super().__init__(up, {})
        self.gate, self.up, self.biases = gate, up, biases or {}
        has_gate = gate is not None
        # What goes in is up, and has ways of its own.
        self.ways = [*list_activations(has_gate=has_gate), *list_functions("output-through")]
        self.ways += [way for part in self.biases for way in list_terms(part)]
        self.fits = [*fit_activations(has_gate=has_gate), *fit_functions("output-through")]
        self.fits += [fit for part in self.biases for fit in fit_terms(part)]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the inside of the block."""
        gate = None if self.gate is None else self.gate[cell.rows][:, cell.positions]
        for part in ("gate-bias", "up-bias"):
            if part in changes:
                added = (times_of(changes[part]) - 1.0) * self.biases[part]
                gate, x = (gate, x + added) if part == "up-bias" or gate is None else (gate + added, x)
        return activate(gate, x, changes)


class GatedGradientFormula(Formula):
    """The gradient of `gate` or `up` (b, s, F), from that of the inside of the block (B, S, F)."""

    def __init__(self, forward: GatedFormula, of: Literal["gate", "up"], gradient: Tensor) -> None:
        self.forward, self.of, self.gradient = forward, of, gradient
        has_gate = forward.gate is not None
        ways = list_activations(has_gate=has_gate)
        # To up comes the value of the activation, to the gate its derivative.
        other = "derivative" if of == "up" and has_gate else "activation"
        self.ways = [way for way in (*list_derivatives(has_gate=has_gate), *ways) if way.part != other]
        edges = ("up",) if of == "up" else ("gate", "activation")
        self.ways += list_gradients_inside(*edges)
        self.fits = [*fit_activations(has_gate=has_gate), *fit_gradients(*edges)]

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell."""
        asked = cell.of_call() if needs_call(changes) else cell
        given = self.gradient[asked.rows][:, asked.positions]
        parts = {"gate": self.forward.gate, "up": self.forward.up}
        leaves = {
            name: None if part is None else part[asked.rows][:, asked.positions].clone().requires_grad_()
            for name, part in parts.items()
        }
        up, leaf = leaves["up"], leaves[self.of]
        assert up is not None
        assert leaf is not None
        with torch.enable_grad():
            found = pull_back(activate(leaves["gate"], up, changes), leaf, given)
        return pick_dims(found if asked is cell else cell.pick_from_call(found), cell)

    def redraw(self) -> Formula | None:
        """Return the same of numbers that are drawn anew."""
        forward = copy(self.forward)
        forward.gate = None if self.forward.gate is None else draw_like(self.forward.gate, 2)
        forward.x = forward.up = draw_like(self.forward.up, 3)
        other = copy(self)
        other.forward, other.gradient = forward, draw_like(self.gradient, 4)
        return other


class SumFormula(TokenFormula):
    """A sum of branches: of a residual and what a module adds to it, of routed and shared experts.

    `others` are values that may stand in the place of a term, by its name and the way.
    """

    def __init__(self, terms: Named, others: Mapping[str, Named] | None = None) -> None:
        super().__init__(next(iter(terms.values())), {})
        self.terms, self.by_name = terms, others or {}
        self.ways = [way for number, name in enumerate(terms) for way in list_terms(f"term-{number}", name)]
        self.ways += [
            Change(part=f"term-{number}", way=way, name=name)
            for number, name in enumerate(terms)
            for way in self.by_name.get(name, {})
        ]
        self.ways += list_functions("output-through")
        self.fits = [way for n, name in enumerate(terms) for way in fit_terms(f"term-{n}", name)]
        self.fits += fit_functions("output-through")

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the sum."""
        total = torch.zeros_like(x)
        for number, (name, right) in enumerate(self.terms.items()):
            change = changes.get(f"term-{number}")
            value = right
            if change is not None and change.way in self.by_name.get(name, {}):
                value, change = self.by_name[name][change.way], None
            total = total + times_of(change) * value[cell.rows][:, cell.positions]
        return total


class HandedFormula(TokenFormula):
    """What a module hands to another one inside of it, x itself (B, S, H)."""

    def __init__(self, x: Tensor, others: Named) -> None:
        super().__init__(x, others)
        self.ways = [way for way in self.ways if way.part != "input-through"]
        self.fits = [fit for fit in self.fits if fit.part != "input-through"]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the tokens."""
        del cell, changes
        return x


class TokenGradientFormula(Formula):
    """What a module that computes token by token passes back (b, s, H), from the gradient (B, S, F) of its output."""

    def __init__(self, forward: TokenFormula, gradient: Tensor) -> None:
        self.forward, self.gradient = forward, gradient
        self.ways = [*forward.backward, *(way for way in forward.ways if way.part != "input")]
        self.ways += list_edge_ways("output", width=gradient.shape[-1], operands=("output",))
        self.ways += list_edge_ways("input", width=forward.x.shape[-1], operands=("input",))
        self.fits = [*fit_gradients(*forward.edges), *forward.fits]
        self.most_paired, self.alone = forward.most_paired, forward.alone

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell."""
        asked = cell.of_call() if needs_call(changes) else cell
        x, given = (each[asked.rows][:, asked.positions] for each in (self.forward.x, self.gradient))
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            came_in = pass_through(leaf, changes.get("input-through"))
            came_in = weigh_gradient(came_in, "input", changes, {"input": came_in})
            output = self.forward.finish(self.forward.compute(came_in, asked, changes), changes)
            output = weigh_gradient(output, "output", changes, {"output": output})
            found = pull_back(output, leaf, given)
        return pick_dims(found if asked is cell else cell.pick_from_call(found), cell)

    def redraw(self) -> Formula | None:
        """Return the same of numbers that are drawn anew."""
        forward = self.forward.redraw()
        if not isinstance(forward, TokenFormula):
            return None
        return TokenGradientFormula(forward, draw_like(self.gradient, 1))


def pull_back(output: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of a leaf, zeros where the output does not depend on it."""
    if not output.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(output, leaf, gradient, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found
