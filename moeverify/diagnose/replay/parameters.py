"""The gradient of a parameter, from what its module took and the gradient of what it put out, call by call.

A backward pass that is written by hand passes back what is right and still gives its weight a wrong gradient: from
another tensor than it should have saved, without some tokens, without a part of the forward pass. It is made in each
call of the module, one for each rank and micro-batch, and what these make is added up.

Letters: B rows and S tokens of the batch, b and s of one call, V rows of an embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from moeverify.diagnose.replay.calls import MICRO_BATCHES, ModuleCall, find_partner, whole_call
from moeverify.diagnose.replay.counted_tokens import COPIES, TOKENS, CountedTokens, is_there
from moeverify.diagnose.replay.experts import ExpertsFormula
from moeverify.diagnose.replay.gradient_ways import list_edge_ways, weigh_gradient
from moeverify.diagnose.replay.grammar import list_functions, pass_through
from moeverify.diagnose.replay.language import Cell, Formula, draw_like
from moeverify.diagnose.replay.tokenwise import TokenFormula, pull_back
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.results.change import Change

_NOT_OF_PARAMETERS = ("output-through",)
_OCCURRENCES = ("last-alone", "first-alone", "mean", "without-first", "without-last")
_TILES = (2, 3, 4, 8, 16, 32, 64, 128, 256)
_OF_COUNTS = frozenset({TOKENS, COPIES, "result", "where"})  # parts that leave alone what a token computes
_MOVES = tuple((way, number) for way in ("of-position", "of-row") for number in (1, -1))


class ParameterGradientFormula(Formula):
    """The gradient of a parameter, as (1, F, ...): its first dim stands where tokens do elsewhere.

    `counted` has the calls that make it, each of which may count other tokens.
    """

    has_pairs = False  # each is a backward pass of all of the batch

    def __init__(self, gradient: Tensor, counted: CountedTokens | None = None) -> None:
        shape = gradient.shape[:-1]
        self.gradient, self.counted = gradient, counted or CountedTokens([whole_call(shape)], shape)
        self._last: tuple[Mapping[str, Change], Tensor] | None = None
        self.places = self.counted.list_places()
        self.ways = [
            *self.counted.list_ways(),
            Change(part="result", way="transposed"),
            Change(part="result", way="reversed"),
        ]

    def keep_alone(self) -> None:
        """Try in single calls no ways but those of which tokens count."""
        self.alone = frozenset(way.part for way in self.ways) - {TOKENS, "occurrences"}

    def list_moves(self) -> list[Change]:
        """Return of which other token of a call, or of which other micro-batch, the input may be."""
        is_one = len({call.micro_batch for call in self.counted.calls}) == 1
        others = () if is_one else MICRO_BATCHES
        moves = [Change(part="input", way=way, number=number) for way, number in _MOVES]
        return [*moves, *(Change(part="input", way=way) for way in others)]

    @abstractmethod
    def differentiate(self, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient of the parameter, in its shape."""

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell, which is a part of the parameter."""
        if self._last is None or self._last[0] != changes:
            with torch.enable_grad():
                found = self.differentiate(changes).detach()
            self._last = dict(changes), _as_tokens(_turn(found, changes.get("result")))
        whole = self._last[1][:, cell.positions]
        for dim, indices in enumerate(cell.dims, 2):
            whole = whole.index_select(dim, indices)
        return whole


class ModuleParameterFormula(ParameterGradientFormula):
    """That of a parameter of a module which computes token by token; `name` is the attribute of the formula.

    All that the module may have otherwise it may have so in its backward pass alone.
    """

    def __init__(
        self, forward: TokenFormula, name: str, gradient: Tensor, counted: CountedTokens | None = None
    ) -> None:
        super().__init__(gradient, counted)
        self.forward, self.name = forward, name
        self._graph: tuple[Tensor, Tensor] | None = None
        others = [Change(part="input", way="of-module", name=other) for other in forward.others]
        self.ways = [
            *self.ways,
            *(self.list_moves() if not isinstance(forward, ExpertsFormula) else []),
            *others,
            *(way for way in forward.ways if way.part not in ("input", *_NOT_OF_PARAMETERS)),
            *list_edge_ways("output", width=gradient.shape[-1], operands=("output",)),
        ]
        self.fits = [fit for fit in forward.fits if fit.part not in _NOT_OF_PARAMETERS]
        self.keep_alone()

    def differentiate(self, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient of the parameter, summed over the calls where these compute otherwise."""
        if changes.keys() <= _OF_COUNTS:
            return self._count_otherwise(changes)
        forward = copy(self.forward)
        leaf = self._take_leaf(forward)
        is_of_experts = isinstance(forward, ExpertsFormula)  # its calls are those of single experts
        calls = [whole_call(self.gradient.shape[:2])] if is_of_experts else self.counted.calls
        return torch.stack([self._differentiate_call(forward, leaf, call, changes) for call in calls]).sum(0)

    def _count_otherwise(self, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient where tokens count otherwise and are computed as they should: one graph is enough."""
        given = self.gradient
        if self._graph is None:
            forward, cell = copy(self.forward), self._make_cell(whole_call(given.shape[:2]))
            leaf = self._take_leaf(forward)
            if isinstance(forward, ExpertsFormula):
                ones = torch.ones(forward.held.gate.shape[1], dtype=given.dtype)
                self._graph = leaf, forward.list_terms(forward.x, cell, {}, ones)
            else:
                self._graph = leaf, forward.compute(forward.x, cell, {})
        leaf, output = self._graph
        given = given.unsqueeze(2).expand_as(output) if isinstance(self.forward, ExpertsFormula) else given
        counts = self.counted.count(changes).to(given.dtype).unsqueeze(-1)
        (found,) = torch.autograd.grad(output, leaf, given * counts, retain_graph=True)
        return found

    def _make_cell(self, call: ModuleCall) -> Cell:
        dims = tuple(map(torch.arange, self.gradient.shape[2:]))
        places = torch.arange(len(call.positions))
        return Cell(0, call.rows, places, call.positions, dims, (call.rows, call.positions))

    def _differentiate_call(
        self,
        forward: TokenFormula,
        leaf: Tensor,
        call: ModuleCall,
        changes: Mapping[str, Change],
    ) -> Tensor:
        given = self.gradient[call.rows][:, call.positions]
        x = pass_through(self._find_input(call, changes.get("input")), changes.get("input-through"))
        output = forward.compute(x, self._make_cell(call), changes)
        return pull_back(weigh_gradient(output, "output", changes, {"output": output}), leaf, given)

    def redraw(self) -> Formula | None:
        """Return the same of numbers that are drawn anew."""
        forward = self.forward.redraw()
        if not isinstance(forward, TokenFormula):
            return None
        other = copy(self)
        other.forward, other.gradient, other._last = forward, draw_like(self.gradient, 1), None
        other._graph = None
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

    def _find_input(self, call: ModuleCall, change: Change | None) -> Tensor:
        """Return what the module is taken to have had as its input in a call (b, s, ...)."""
        of_module = change is not None and change.way == "of-module"
        x = self.forward.others[change.name] if change is not None and of_module else self.forward.x
        return _move(x, call, None if of_module else change, self.counted.calls)


class EmbeddingGradientFormula(ParameterGradientFormula):
    """That of an embedding's weight (V, H): of each row the sum over the tokens that looked it up."""

    def __init__(
        self, module: nn.Embedding, tokens: Tensor, gradient: Tensor, counted: CountedTokens | None = None
    ) -> None:
        super().__init__(gradient, counted)
        self.tokens, self.count = tokens, module.num_embeddings
        most = max(call.at.numel() for call in self.counted.calls)
        ways = [Change(part="occurrences", way=way) for way in _OCCURRENCES]
        ways += [
            Change(part="occurrences", way=way, number=n)
            for way in ("last-alone-in-tiles", "first-alone-in-tiles", "first-ones")
            for n in _TILES
            if n < most
        ]
        ways += [Change(part="rows", way="shifted", number=number) for number in (1, -1)]
        self.ways = [*ways, *self.ways, *self.list_moves()]
        self.ways += list_edge_ways("output", width=gradient.shape[-1])
        self.ways += list_functions("output-through", ("of-unit-length", "reversed"))
        self.keep_alone()

    def differentiate(self, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient of the weight."""
        counts = self.counted.count(changes).to(self.gradient.dtype)
        gradient = self.gradient * counts.unsqueeze(-1)
        total = torch.zeros(self.count, gradient.shape[-1], dtype=gradient.dtype)
        for call in self.counted.calls:
            tokens = _move(self.tokens, call, changes.get("input"), self.counted.calls).flatten()
            if change := changes.get("rows"):
                tokens = (tokens + int(change.number or 0)) % self.count
            given = gradient[call.rows][:, call.positions]
            leaf = torch.zeros_like(given).requires_grad_()
            # What comes back to each token, as it comes back otherwise.
            flat = pull_back(weigh_gradient(leaf * 1.0, "output", changes), leaf, given).flatten(0, 1)
            change = changes.get("occurrences")
            if change is not None and is_there(call, changes):
                flat = flat * _count_occurrences(tokens, change).to(flat.dtype).unsqueeze(-1)
            total = total.index_add(0, tokens, flat)
        return total

    def redraw(self) -> Formula | None:
        """Return the same of a gradient that is drawn anew."""
        other = copy(self)
        other.gradient, other._last = draw_like(self.gradient), None
        return other


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


def _move(x: Tensor, call: ModuleCall, change: Change | None, calls: Sequence[ModuleCall]) -> Tensor:
    """Return of x (B, S, ...) what a call takes (b, s, ...), or what it takes otherwise."""
    number = 0 if change is None else int(change.number or 0)
    source: ModuleCall | None = call
    if change is not None and change.way in MICRO_BATCHES:
        source = find_partner(calls, call, change.way)
    if source is None:
        return x[call.rows][:, call.positions] * (torch.nan if x.is_floating_point() else 0)
    own = x[source.rows][:, source.positions]
    return own.roll(-number, 0 if change is not None and change.way == "of-row" else 1) if number else own


def _count_occurrences(tokens: Tensor, change: Change) -> Tensor:
    """Return how often each token (n) of a call counts in the row that it looked up."""
    number, way = int(change.number or 0), change.way
    groups = tokens
    if way.endswith("-in-tiles"):
        # Of equal tokens in each tile of so many one counts, and what tiles make is added up.
        groups = tokens + torch.arange(len(tokens)) // number * (int(tokens.max()) + 1)
    equal = groups.unsqueeze(0) == groups.unsqueeze(1)
    before, all_of_them = equal.tril(-1).sum(1), equal.sum(1)
    ways: Mapping[str, Callable[[], Tensor]] = {
        "first-alone": lambda: before == 0,
        "first-alone-in-tiles": lambda: before == 0,
        "last-alone": lambda: before == all_of_them - 1,
        "last-alone-in-tiles": lambda: before == all_of_them - 1,
        "without-first": lambda: before > 0,
        "without-last": lambda: before < all_of_them - 1,
        "first-ones": lambda: before < number,
        "mean": lambda: 1.0 / all_of_them,
    }
    return ways[way]()


def _turn(found: Tensor, change: Change | None) -> Tensor:
    """Return the gradient of a parameter as it is stored otherwise."""
    if change is None:
        return found
    if change.way == "reversed":
        return found.flip(-1)
    is_square = found.ndim > 1 and found.shape[-1] == found.shape[-2]
    return found.transpose(-1, -2) if is_square else found * torch.nan
