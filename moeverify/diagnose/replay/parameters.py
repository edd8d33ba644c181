"""The gradient of a parameter, from what its module took and the gradient of what it put out, all of the batch.

A backward pass that is written by hand passes back what is right and still gives its weight a wrong gradient: from
another tensor than it should have saved, without some tokens, without a part of the forward pass.

Letters: B rows and S tokens of the batch, V rows of an embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from moeverify.diagnose.replay.experts import ExpertsFormula
from moeverify.diagnose.replay.gradient_ways import list_edge_ways, weigh_gradient
from moeverify.diagnose.replay.grammar import list_functions, pass_through
from moeverify.diagnose.replay.language import Cell, Formula, draw_like
from moeverify.diagnose.replay.tokenwise import TokenFormula, pull_back
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.results.change import Change

_MOST_ROWS = 16
_NOT_OF_PARAMETERS = ("output-through",)


class ParameterGradientFormula(Formula):
    """The gradient of a parameter, as (1, F, ...): its first dim stands where tokens do elsewhere."""

    has_pairs = False  # each is a backward pass of all of the batch

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self._last: tuple[Mapping[str, Change], Tensor] | None = None
        num_rows, length = gradient.shape[:2]
        self.ways = [
            *(
                Change(part="tokens", way=way, number=n)
                for way in ("without-row", "row-alone")
                for n in range(min(num_rows, _MOST_ROWS) if num_rows > 1 else 0)
            ),
            *(Change(part="tokens", way="without-position", number=n) for n in (0, length - 1)),
            *(Change(part="tokens", way="position-alone", number=n) for n in (0, length - 1)),
            *(
                Change(part="tokens", way="first-positions", number=length // n)
                for n in (2, 4)
                if length % n == 0
            ),
            *(Change(part="tokens", way="first-rows", number=n) for n in range(2, min(num_rows, _MOST_ROWS))),
            Change(part="result", way="transposed"),
            Change(part="result", way="reversed"),
        ]

    @abstractmethod
    def differentiate(self, gradient: Tensor, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient of the parameter, in its shape, from that of the output (B, S, ...)."""

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell, which is a part of the parameter."""
        if self._last is None or self._last[0] != changes:
            gradient = self.gradient * _keep(self.gradient, changes.get("tokens"))
            with torch.enable_grad():
                found = self.differentiate(gradient, changes).detach()
            self._last = dict(changes), _as_tokens(_turn(found, changes.get("result")))
        whole = self._last[1][:, cell.positions]
        for dim, indices in enumerate(cell.dims, 2):
            whole = whole.index_select(dim, indices)
        return whole


class ModuleParameterFormula(ParameterGradientFormula):
    """That of a parameter of a module which computes token by token; `name` is the attribute of the formula.

    All that the module may have otherwise it may have so in its backward pass alone.
    """

    def __init__(self, forward: TokenFormula, name: str, gradient: Tensor) -> None:
        super().__init__(gradient)
        self.forward, self.name = forward, name
        moves = [(way, number) for way in ("of-position", "of-row") for number in (1, -1)]
        inputs = [Change(part="input", way=way, number=number) for way, number in moves]
        inputs += [Change(part="input", way="of-module", name=other) for other in forward.others]
        self.ways = [
            *self.ways,
            *inputs,
            *(way for way in forward.ways if way.part not in ("input", *_NOT_OF_PARAMETERS)),
            *list_edge_ways("output", width=gradient.shape[-1], operands=("output",)),
        ]
        self.fits = [fit for fit in forward.fits if fit.part not in _NOT_OF_PARAMETERS]

    def differentiate(self, gradient: Tensor, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient of the parameter."""
        forward, x = copy(self.forward), self._find_input(changes.get("input"))
        leaf = self._take_leaf(forward)
        rows, positions = (torch.arange(size) for size in x.shape[:2])
        whole = Cell(0, rows, positions, positions, tuple(map(torch.arange, gradient.shape[2:])))
        came_in = pass_through(x, changes.get("input-through"))
        output = forward.compute(came_in, replace(whole, call=(whole.rows, whole.positions)), changes)
        return pull_back(weigh_gradient(output, "output", changes, {"output": output}), leaf, gradient)

    def redraw(self) -> Formula | None:
        """Return the same of numbers that are drawn anew."""
        forward = self.forward.redraw()
        if not isinstance(forward, TokenFormula):
            return None
        other = copy(self)
        other.forward, other.gradient, other._last = forward, draw_like(self.gradient, 1), None
        return other

    def _take_leaf(self, forward: TokenFormula) -> Tensor:
        """Return the parameter of a copy of the formula, which follows its gradient."""
        if isinstance(forward, ExpertsFormula):
            leaf: Tensor = getattr(forward.held, self.name).detach().clone().requires_grad_()
            forward.held = forward.held._replace(**{self.name: leaf})
            return leaf
        leaf = getattr(forward, self.name).detach().clone().requires_grad_()
        setattr(forward, self.name, leaf)
        return leaf

    def _find_input(self, change: Change | None) -> Tensor:
        """Return what the module is taken to have had as its input (B, S, ...)."""
        if change is None:
            return self.forward.x
        if change.way == "of-module":
            return self.forward.others[change.name]
        return self.forward.x.roll(-int(change.number or 0), 0 if change.way == "of-row" else 1)


class EmbeddingGradientFormula(ParameterGradientFormula):
    """That of an embedding's weight (V, H): of each row the sum over the tokens that looked it up."""

    def __init__(self, module: nn.Embedding, tokens: Tensor, gradient: Tensor) -> None:
        super().__init__(gradient)
        self.tokens, self.count = tokens, module.num_embeddings
        ways = [Change(part="occurrences", way=way) for way in ("last-alone", "first-alone", "mean")]
        ways += [Change(part="rows", way="shifted", number=number) for number in (1, -1)]
        ways += [Change(part="input", way="of-position", number=number) for number in (1, -1)]
        ways += [Change(part="input", way="of-row", number=number) for number in (1, -1)]
        self.ways = [*ways, *self.ways, *list_edge_ways("output", width=gradient.shape[-1])]
        self.ways += list_functions("output-through", ("of-unit-length", "reversed"))

    def differentiate(self, gradient: Tensor, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient of the weight."""
        tokens = self.tokens
        if change := changes.get("input"):
            tokens = tokens.roll(-int(change.number or 0), 0 if change.way == "of-row" else 1)
        if change := changes.get("rows"):
            tokens = (tokens + int(change.number or 0)) % self.count
        leaf = torch.zeros_like(gradient).requires_grad_()
        # What comes back to each token, as it comes back otherwise.
        given = pull_back(weigh_gradient(leaf * 1.0, "output", changes), leaf, gradient)
        flat, at = given.flatten(0, 1), tokens.flatten()
        counts = torch.bincount(at, minlength=self.count).to(flat.dtype)
        if "occurrences" in changes:
            flat = flat * self._weigh(at, counts, changes["occurrences"].way).unsqueeze(-1)
        return torch.zeros(self.count, flat.shape[-1], dtype=flat.dtype).index_add(0, at, flat)

    def redraw(self) -> Formula | None:
        """Return the same of a gradient that is drawn anew."""
        other = copy(self)
        other.gradient, other._last = draw_like(self.gradient), None
        return other

    def _weigh(self, at: Tensor, counts: Tensor, way: str) -> Tensor:
        """Return how often each token (n) counts in the row that it looked up."""
        if way == "mean":
            return 1.0 / counts[at]
        order = at if way == "first-alone" else at.flip(0)
        is_first = torch.tensor([value not in order[:n] for n, value in enumerate(order.tolist())])
        return (is_first if way == "first-alone" else is_first.flip(0)).to(counts.dtype)


def as_module_tensor(tensor: WrongTensor) -> WrongTensor:
    """Return the gradient of a parameter as `ParameterGradientFormula` has it, with what each rank has of it."""
    boxes = [shard for shard in tensor.shards if shard.region.flat is None and shard.local is not None]
    if len(boxes) < len(tensor.shards):
        # Parts of a flattened tensor are put together: which rank has which is then not said.
        boxes = [RankShard(tensor.worst_shard.rank, Region.whole(tensor.expected.shape), tensor.whole)]
    expected = _as_tokens(tensor.expected)
    shards = []
    for shard in boxes:
        dims = [range(1), *shard.region.dims, *([range(1)] if tensor.expected.ndim == 1 else [])]
        region = Region.box(expected.shape, dims)
        shards.append(RankShard(shard.rank, region, shard.values().reshape(region.local_shape)))
    return replace(tensor, expected=expected, shards=tuple(shards))


def _as_tokens(parameter: Tensor) -> Tensor:
    """Return (F, ...) as (1, F, ...), and (F) as (1, F, 1)."""
    return parameter.unsqueeze(0) if parameter.ndim > 1 else parameter[None, :, None]


def _keep(gradient: Tensor, change: Change | None) -> Tensor:
    """Return ones at the tokens that count and zeros at others, broadcast to (B, S, ...)."""
    rows, positions = (torch.arange(size) for size in gradient.shape[:2])
    number = 0 if change is None else int(change.number or 0)
    ones = torch.ones(len(rows), len(positions), dtype=torch.bool)
    ways: Mapping[str, Callable[[], Tensor]] = {
        "without-row": lambda: (rows != number)[:, None],
        "row-alone": lambda: (rows == number)[:, None],
        "first-rows": lambda: (rows < number)[:, None],
        "without-position": lambda: positions != number,
        "position-alone": lambda: positions == number,
        "first-positions": lambda: positions < number,
    }
    kept = ones if change is None else ones & ways[change.way]()
    return kept.to(gradient.dtype).view(*kept.shape, *(1 for _ in gradient.shape[2:]))


def _turn(found: Tensor, change: Change | None) -> Tensor:
    """Return the gradient of a parameter as it is stored otherwise."""
    if change is None:
        return found
    if change.way == "reversed":
        return found.flip(-1)
    is_square = found.ndim > 1 and found.shape[-1] == found.shape[-2]
    return found.transpose(-1, -2) if is_square else found * torch.nan
