"""The routed experts that a token's choices combine, forward and backward.

Letters: b rows and s tokens of what is asked for, B and S of the batch, E experts, k choices, H hidden, F hidden
of an expert, n ranks that hold slices of F.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.diagnose.replay.activations import activate, fit_activations, list_activations
from moeverify.diagnose.replay.counts import NO_EXPERT
from moeverify.diagnose.replay.exchange import PARTS, Call, Exchanges, iterate_parts
from moeverify.diagnose.replay.gradient_ways import weigh_gradient
from moeverify.diagnose.replay.grammar import fit_terms, list_terms, times_of
from moeverify.diagnose.replay.language import Cell
from moeverify.diagnose.replay.tokenwise import Named, TokenFormula
from moeverify.model.experts import Experts
from moeverify.model.router import Routing
from moeverify.results.change import Change

_UNITS = ("gate-units", "up-units", "down-units")
_HELD = ("gate", "up", "down", "gate-bias", "up-bias", "down-bias")
"""The parameters of experts; with `-held` the part of what a rank holds of one."""
_SUM = "sum-over-ep"
_MOST_CAPACITY = 64
_MOST_EXPERTS = 64
"""Of which it is tried, one by one, whether what they put out is lost."""


@dataclass(frozen=True)
class ExpertLayout:
    """Where experts live, and which tokens travel together.

    `ep_ranks` has for each rank its number among those that divide the experts, `slice_ranks` that among the
    `num_slices` that divide each expert's hidden units. `calls` are the exchanges of the step, none where these
    are not known.
    """

    ep_ranks: Sequence[int] = (0,)
    slice_ranks: Sequence[int] = ()
    num_slices: int = 1
    calls: Sequence[Call] = field(default=())


ONE_DEVICE = ExpertLayout()


class ExpertsFormula(TokenFormula):
    """The sum over a token's choices of weight * expert(x): (b, s, H). `routing` is the golden's."""

    def __init__(
        self, experts: Experts, x: Tensor, routing: Routing, others: Named, layout: ExpertLayout
    ) -> None:
        super().__init__(x, others)
        self.held, self.layout = experts.collect_weights(), layout
        self.ids, self.weights = routing.ids, routing.weights
        self.num_ranks = max(layout.ep_ranks) + 1
        self.count, self.num_choices = self.held.gate.shape[0], self.ids.shape[-1]
        self.exchanges = Exchanges(layout.calls, self.ids.flatten(0, 1), self.count)
        ways = [*self._list_weights(), *self._list_choices(), *list_activations(has_gate=True)]
        ways += self._list_slices() if layout.num_slices > 1 else []
        if self.held.down_bias is not None:
            biases = ("gate-bias", "up-bias", "down-bias")
            ways += [way for part in biases for way in list_terms(part)]
            ways.append(Change(part="down-bias", way="unweighted"))
            ways.append(Change(part="gate", way="weights-exchanged"))
            self.fits = [*self.fits, *(fit for part in biases for fit in fit_terms(part))]
        self.fits = [*fit_activations(has_gate=True), *self.fits]
        self.ways = [
            *ways,
            *(way for way in self.ways if way.way != "of-row"),
            *self._list_capacities(),
            *self.exchanges.list_ways(),
        ]
        # What a way of these gives in one place alone is no bug that is known of, and costs as much as all others.
        self.alone = PARTS | TokenFormula.alone | {"input", "slices", _SUM, *_UNITS}
        self._numbers: dict[str, Tensor] = {}
        self.places = [
            Change(part="where", way=way, number=number)
            for way, size in (("slice", layout.num_slices), ("expert-rank", self.num_ranks))
            for number in range(size if size > 1 else 0)
        ]

    def _list_weights(self) -> list[Change]:
        ways = [Change(part="weights", way=way) for way in ("none", "equal", "before", "squared", "reversed")]
        ways += [Change(part="weights", way="of-choice", number=n) for n in range(1, self.num_choices)]
        ways += [Change(part="weights", way="of-position", number=number) for number in (1, -1)]
        if self.exchanges.calls:
            ways += [Change(part="weights", way=way) for way in ("sorted", "unsorted")]
        return ways

    def _list_choices(self) -> list[Change]:
        ways = [Change(part="choices", way="without", number=number) for number in range(self.num_choices)]
        ways += [Change(part="choices", way="only", number=number) for number in range(self.num_choices)]
        few = min(self.count, _MOST_EXPERTS)
        ways += [Change(part="choices", way="without-expert", number=number) for number in range(few)]
        if self.num_ranks > 1:
            per_rank = min(self.count // self.num_ranks, _MOST_EXPERTS)
            ways += [Change(part="choices", way="without-local", number=number) for number in range(per_rank)]
            for way in ("without-rank", "only-rank"):
                ways += [Change(part="choices", way=way, number=number) for number in range(self.num_ranks)]
            ways += [Change(part="choices", way=way) for way in ("own-rank", "not-own-rank")]
            ways += [Change(part=_SUM, way="of-other-tokens")] if self.exchanges.calls else []
        ways += [Change(part="experts", way="of-expert", number=number) for number in (1, -1)]
        ways += [Change(part="experts", way="of-choice", number=n) for n in range(1, self.num_choices)]
        if self.num_ranks > 1:
            ways += [Change(part="experts", way="of-rank", number=number) for number in (1, -1)]
            ways += [Change(part="experts", way=way) for way in ("first-rank", "across", "along")]
            ways.append(Change(part="experts", way="reversed-in-rank"))
            ways += [Change(part="experts", way="next-in-rank", number=number) for number in (1, -1)]
            ways += self._list_held()
        return [*ways, Change(part="experts", way="reversed")]

    def _list_held(self) -> list[Change]:
        """Return what ranks of ep may hold in the place of their experts: of all parameters, or of one."""
        is_whole = self.held.gate.shape[1] % self.num_ranks == 0
        ways = [Change(part="experts", way="by-units")] if is_whole else []
        for name in _HELD if self.held.down_bias is not None else _HELD[:3]:
            ways += [Change(part=f"{name}-held", way=way) for way in ("first-rank", "reversed", "across")]
            ways += [Change(part=f"{name}-held", way="of-rank", number=number) for number in (1, -1)]
        return ways

    def _list_slices(self) -> list[Change]:
        """Return what ranks that hold slices of each expert may have otherwise."""
        size = self.layout.num_slices
        ways = [Change(part="slices", way=way) for way in ("own", "not-own", "own-times")]
        ways += [Change(part="slices", way=way, number=n) for n in range(size) for way in ("without", "of")]
        for part in _UNITS:
            ways += [Change(part=part, way="of-rank", number=number) for number in (1, -1)]
            ways += [Change(part=part, way=way) for way in ("reversed", "first", "in-turn")]
        return ways

    def _list_capacities(self) -> Sequence[Change]:
        """Return how many copies an expert may take before it drops those that come later.

        Of all that come to it, or of those that each rank sends where ranks do not know of each other.
        """
        counts = torch.bincount(self.ids.flatten(), minlength=self.count)
        most = min(int(counts.max()), _MOST_CAPACITY)
        calls = self.exchanges.calls
        ways = ["capacity", *(["capacity-of-call"] if len(calls) > 1 else [])]
        ways += ["capacity-of-rank"] if any(len(call) > 1 for call in calls) else []
        return [Change(part="choices", way=way, number=number) for way in ways for number in range(1, most)]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the combined outputs."""
        if _SUM in changes:
            return self._sum_places()[cell.rows][:, cell.positions]
        where = changes.get("where")
        inner = {part: change for part, change in changes.items() if part != "where"}
        if where is None:
            return self._combine(x, cell, inner, *self._keep_units(inner.get("slices"), cell))
        number = int(where.number or 0)
        if where.way == "slice":
            own = self._slice(number)
            bias = float(number == 0)
            varied = self._combine(x, cell, inner, own, bias)
            return varied + self._combine(x, cell, {}, 1.0 - own, 1.0 - bias)
        ids = self.ids[cell.rows][:, cell.positions]
        is_there = (ids // max(self.count // self.num_ranks, 1) == number).unsqueeze(-1)
        one = torch.ones(self.held.gate.shape[1], dtype=x.dtype)
        terms = [self.list_terms(x, cell, each, one) for each in (inner, {})]
        return torch.where(is_there, terms[0], terms[1]).sum(2)

    def _combine(
        self, x: Tensor, cell: Cell, changes: Mapping[str, Change], units: Tensor, bias: float = 1.0
    ) -> Tensor:
        return self.list_terms(x, cell, changes, units, bias).sum(2)

    def list_terms(
        self, x: Tensor, cell: Cell, changes: Mapping[str, Change], units: Tensor, bias: float = 1.0
    ) -> Tensor:
        """Return what each choice adds (b, s, k, H), of some hidden units (F) and so many times the last bias."""
        ids, weights = self._pick(cell, changes)
        rows = x.unsqueeze(2).expand(*ids.shape, x.shape[-1])
        ids, copies = self._travel(ids, cell, changes)
        if copies is not None:
            rows = self.x.flatten(0, 1)[copies // self.num_choices]
            weights, ids = weights * (ids != NO_EXPERT), ids.clamp(min=0)
        is_before = "weights" in changes and changes["weights"].way == "before"
        is_apart = "down-bias" in changes and changes["down-bias"].way == "unweighted"
        weight = weights.unsqueeze(-1)
        rows = weigh_gradient(rows * weight if is_before else rows, "rows", changes)
        if "experts" in changes and changes["experts"].way == "by-units":
            out, last = self._run_by_units(rows, self.ids[cell.rows][:, cell.positions], changes, units)
        else:
            out, last = self.run(rows, ids, changes, units)
        last = last * bias
        added = last if is_apart else 0.0
        out = weigh_gradient(out if is_apart else out + last, "outputs", changes)
        return (out * (weight != 0) if is_before else out * weight) + added

    def _travel(self, ids: Tensor, cell: Cell, changes: Mapping[str, Change]) -> tuple[Tensor, Tensor | None]:
        """Return the experts (b, s, k) that compute for a cell, and the copies whose rows they get, if others."""
        change = next(iterate_parts(changes), None)
        if change is None:
            return ids, None
        found = self.exchanges.travel(change)
        copies, experts = (
            each.view(self.ids.shape)[cell.rows][:, cell.positions] for each in (found.copies, found.experts)
        )
        return experts, copies

    def _run_by_units(
        self, x: Tensor, ids: Tensor, changes: Mapping[str, Change], units: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `run` does where each rank of ep holds a slice of the hidden units of all experts.

        What comes for its own experts it gives to the first ones of all.
        """
        owner = ids // max(self.count // self.num_ranks, 1)
        first = ids % max(self.count // self.num_ranks, 1)
        parts = [
            self.run(x, first, changes, units * self._slice(rank, self.num_ranks))
            for rank in range(self.num_ranks)
        ]
        out, last = (
            torch.stack(each).gather(0, _widen(owner, each[0])).squeeze(0)
            for each in zip(*parts, strict=True)
        )
        return out, last

    def _slice(self, number: int, count: int | None = None) -> Tensor:
        """Return ones at the hidden units (F) of a slice of so many, those of etp by default, zeros elsewhere."""
        width = self.held.gate.shape[1]
        part = torch.arange(width) // (width // (count or self.layout.num_slices))
        return (part == number).to(self.held.gate.dtype)

    def _keep_units(self, change: Change | None, cell: Cell) -> tuple[Tensor, float]:
        """Return how often each hidden unit (F) counts, and how often the last bias, which the first slice adds."""
        if change is None:
            return torch.ones(self.held.gate.shape[1], dtype=self.held.gate.dtype), 1.0
        size, own = self.layout.num_slices, self.layout.slice_ranks[cell.rank]
        number = own if change.way.endswith(("own", "own-times")) else int(change.number or 0)
        units, bias = self._slice(number), float(number == 0)
        if change.way in ("not-own", "without"):
            return 1.0 - units, 1.0 - bias
        times = size if change.way in ("own-times", "of") else 1
        return units * times, bias * times

    def run(
        self, x: Tensor, ids: Tensor, changes: Mapping[str, Change], units: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of experts (b, s, k, H) without their last bias, and that bias.

        Rows are sorted by expert, so that products alone are made one expert at a time.
        """
        held, width = self.held, x.shape[-1]
        order = ids.flatten().argsort(stable=True)
        chosen = ids.flatten()[order]
        lengths = Counter(chosen.tolist())
        experts, sizes = torch.tensor(list(lengths)), list(lengths.values())
        rows = x.reshape(-1, width)[order].split_with_sizes(sizes)
        gate = _multiply(rows, held.gate, self._find_held("gate", experts, changes))
        up = _multiply(rows, held.up, self._find_held("up", experts, changes))
        if "gate" in changes and changes["gate"].way == "weights-exchanged":
            gate, up = up, gate
        outputs = x.new_zeros(len(chosen), held.down.shape[1])
        biases = torch.zeros_like(outputs)
        if held.gate_bias is not None and held.up_bias is not None and held.down_bias is not None:
            own = {name: self._find_held(name, chosen, changes) for name in _HELD[3:]}
            gate = gate + held.gate_bias[own["gate-bias"]] * times_of(changes.get("gate-bias"))
            up = up + held.up_bias[own["up-bias"]] * times_of(changes.get("up-bias"))
            change = changes.get("down-bias")
            is_whole = change is None or change.way == "unweighted"
            biases[order] = held.down_bias[own["down-bias"]] * (1.0 if is_whole else times_of(change))
        orders = [self._order_units(changes.get(part)) for part in _UNITS]
        inside = activate(gate[..., orders[0]], up[..., orders[1]], changes) * units
        owners = self._find_held("down", experts, changes)
        outputs[order] = _multiply(inside.split_with_sizes(sizes), held.down, owners, orders[2])
        shape = (*ids.shape, outputs.shape[-1])
        return outputs.view(shape), biases.view(shape)

    def _find_held(self, name: str, experts: Tensor, changes: Mapping[str, Change]) -> Tensor:
        """Return whose values a parameter has in the place of those of each of these experts."""
        change = changes.get(f"{name}-held")
        return experts if change is None else self._renumber(experts, change)

    def _order_units(self, change: Change | None) -> Tensor:
        """Return which hidden unit stands at each place (F) of a weight."""
        width, size = self.held.gate.shape[1], self.layout.num_slices
        units = torch.arange(width)
        if change is None:
            return units
        slices = units.view(size, -1)
        ways = {
            "of-rank": lambda: slices.roll(-int(change.number or 0), 0),
            "reversed": lambda: slices.flip(0),
            "first": lambda: slices[:1].expand(size, -1),
            "in-turn": lambda: units.view(-1, size).T,
        }
        return ways[change.way]().flatten()

    def _sum_places(self) -> Tensor:
        """Return (B, S, H) where each rank's experts compute its own tokens alone, and ranks add these up by place.

        Not a number where the ranks of an exchange have more or fewer tokens than each other.
        """
        if _SUM in self._numbers:
            return self._numbers[_SUM]
        owner = self.ids // max(self.count // self.num_ranks, 1)
        terms = (self.list_outputs() * self.weights.unsqueeze(-1)).flatten(0, 1)  # (B * S, k, H)
        found = torch.full_like(terms[:, 0], torch.nan)
        for call in self.exchanges.calls:
            if len({len(tokens) for tokens in call}) == 1:
                parts = [
                    (terms[tokens] * (owner.flatten(0, 1)[tokens] == rank).unsqueeze(-1)).sum(1)
                    for rank, tokens in enumerate(call)
                ]
                found[torch.cat(list(call))] = torch.stack(parts).sum(0).repeat(len(call), 1)
        self._numbers[_SUM] = found.view(*self.ids.shape[:2], -1)
        return self._numbers[_SUM]

    def _pick(self, cell: Cell, changes: Mapping[str, Change]) -> tuple[Tensor, Tensor]:
        """Return the experts (b, s, k) of the cell's tokens, and the weights of their outputs."""
        ids, weights = (each[cell.rows][:, cell.positions] for each in (self.ids, self.weights))
        weight, choice, expert = (changes.get(part) for part in ("weights", "choices", "experts"))
        if weight is not None:
            weights = self._weigh(weights, weight, cell)
        if choice is not None:
            weights = weights * self._keep(choice, ids, cell)
        return ids if expert is None else self._renumber(ids, expert), weights

    def _weigh(self, weights: Tensor, change: Change, cell: Cell) -> Tensor:
        """Return the combine weights (b, s, k) in place of the right ones."""
        number = int(change.number or 0)
        ways: dict[str, Callable[[], Tensor]] = {
            "none": lambda: torch.ones_like(weights),
            "equal": lambda: torch.full_like(weights, 1.0 / self.num_choices),
            "squared": weights.square,
            "reversed": lambda: weights.flip(-1),
            "of-choice": lambda: weights.roll(-number, -1),
            "of-position": lambda: self.weights.roll(-number, 1)[cell.rows][:, cell.positions],
        }
        if change.way in ("sorted", "unsorted"):
            step = ("restored", "skipped") if change.way == "sorted" else ("copies", "unsorted")
            copies = self.exchanges.travel(Change(part=step[0], way=step[1])).copies
            whole = self.weights.flatten()[copies].view(self.weights.shape)
            return whole[cell.rows][:, cell.positions]
        return ways[change.way]() if change.way in ways else weights

    def _keep(self, choice: Change, ids: Tensor, cell: Cell) -> Tensor:
        """Return which choices (b, s, k) of a cell count."""
        number, place = int(choice.number or 0), torch.arange(self.num_choices)
        owner = ids // max(self.count // self.num_ranks, 1)
        ways = {
            "without": lambda: (place != number).expand_as(ids),
            "only": lambda: (place == number).expand_as(ids),
            "without-expert": lambda: ids != number,
            "without-local": lambda: ids % max(self.count // self.num_ranks, 1) != number,
            "without-rank": lambda: owner != number,
            "only-rank": lambda: owner == number,
            "own-rank": lambda: owner == self.layout.ep_ranks[cell.rank],
            "not-own-rank": lambda: owner != self.layout.ep_ranks[cell.rank],
        }
        if choice.way in ways:
            return ways[choice.way]()
        return (self._number_copies(choice.way) <= number)[cell.rows][:, cell.positions]

    def _number_copies(self, way: str) -> Tensor:
        """Return for each choice (B, S, k) which copy of its expert it is, counted from 1 in the order of tokens."""
        if way in self._numbers:
            return self._numbers[way]
        flat = self.ids.flatten()
        found = torch.empty_like(flat)
        everything = torch.arange(flat.numel() // self.num_choices)
        groups = {
            "capacity-of-call": [torch.cat(call) for call in self.exchanges.calls],
            "capacity-of-rank": [tokens for call in self.exchanges.calls for tokens in call],
        }.get(way, [everything])
        for tokens in groups:
            copies = (tokens.unsqueeze(1) * self.num_choices + torch.arange(self.num_choices)).flatten()
            chosen = torch.nn.functional.one_hot(flat[copies], self.count)
            found[copies] = (chosen.cumsum(0) * chosen).sum(-1)
        self._numbers[way] = found.view_as(self.ids)
        return self._numbers[way]

    def _renumber(self, ids: Tensor, change: Change) -> Tensor:
        """Return the experts that compute in the place of others."""
        number, per_rank = int(change.number or 0), max(self.count // self.num_ranks, 1)
        ways = {
            "by-units": lambda: ids % per_rank,
            "of-expert": lambda: (ids + number) % self.count,
            "of-choice": lambda: ids.roll(-number, -1),
            "of-rank": lambda: (ids + number * per_rank) % self.count,
            "reversed": lambda: self.count - 1 - ids,
            "first-rank": lambda: ids % per_rank,
            "reversed-in-rank": lambda: ids // per_rank * per_rank + per_rank - 1 - ids % per_rank,
            "next-in-rank": lambda: ids // per_rank * per_rank + (ids + number) % per_rank,
            "across": lambda: ids % self.num_ranks * per_rank + ids // self.num_ranks,
            "along": lambda: ids % per_rank * self.num_ranks + ids // per_rank,
        }
        return ways[change.way]()

    def list_outputs(self, ids: Tensor | None = None) -> Tensor:
        """Return the output of each choice (B, S, k, H), not weighted; of others than the right ones, by `ids`."""
        ids = self.ids if ids is None else ids
        ones = torch.ones(self.held.gate.shape[1], dtype=self.x.dtype)
        rows = self.x.unsqueeze(2).expand(*ids.shape, self.x.shape[-1])
        out, bias = self.run(rows, ids, {}, ones)
        return out + bias


def _multiply(
    rows: Sequence[Tensor], weights: Tensor, experts: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return rows (n, I) of one expert after the other times its weight (O, I), whose inputs may stand otherwise."""
    turned = (weights[expert].T for expert in experts.tolist())
    products = [
        part @ (weight if order is None else weight[order]) for part, weight in zip(rows, turned, strict=True)
    ]
    return torch.cat([weights.new_zeros(0, weights.shape[1]), *products])  # of no rows there are none


def _widen(index: Tensor, like: Tensor) -> Tensor:
    """Return an index (b, s, k) as one into a stack of tensors (b, s, k, H): (1, b, s, k, H)."""
    return index.unsqueeze(-1).expand_as(like).unsqueeze(0)
