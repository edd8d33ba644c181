"""A router's weights, and the routed experts that they combine.

Letters: b rows and s tokens of what is asked for, E experts, k choices, H hidden, F hidden of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.replay.language import Cell
from moeverify.diagnose.replay.tokenwise import Named, TokenFormula, activate, list_activations, times_of
from moeverify.model.experts import Experts
from moeverify.model.router import Router, Routing, take_best
from moeverify.results.operation import Change


class RouterFormula(TokenFormula):
    """The combine weights (b, s, k) of the chosen experts, best first."""

    def __init__(self, module: Router, x: Tensor, others: Named) -> None:
        super().__init__(x, others)
        self.module, self.spec = module, module.spec
        spec, sigmoid = module.spec, module.spec.score == "sigmoid"
        ways = [
            Change(part="score", way="softmax" if sigmoid else "sigmoid"),
            Change(part="score", way="logits"),
        ]
        ways += [Change(part="score", way=way) for way in ("of-choices", "softmax-twice")]
        ways += [Change(part="normalization", way="none" if spec.renormalize else "added")]
        ways.append(Change(part="normalization", way="softmax"))
        ways += (
            [Change(part="route-scale", way=way) for way in ("none", "twice")]
            if spec.route_scale != 1
            else []
        )
        ways += [Change(part="order", way=way) for way in ("reversed", "worst", "next")]
        if module.bias is not None:
            ways += [Change(part="bias", way="none"), Change(part="bias", way="opposite")]
        if module.selection_bias is not None:
            ways += [Change(part="selection-bias", way=way) for way in ("none", "opposite", "in-weights")]
        if spec.top_groups != spec.num_groups:
            ways += [Change(part="groups", way="none")]
            ways += [Change(part="groups", way="sum" if spec.group_score == "max" else "max")]
        self.ways = [*ways, *self.ways]
        self.fits = [Change(part="logits", way="times", number=number) for number in (0.5, 2.0)]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the weights of the experts that are chosen."""
        logits = x @ self.module.weight.T
        if self.module.bias is not None:
            logits = logits + self.module.bias * times_of(changes.get("bias"))
        logits = logits * (times_of(changes["logits"]) if "logits" in changes else 1.0)
        scores = self._score(logits, changes)
        added = self.module.selection_bias
        change = changes.get("selection-bias")
        times = 1.0 if change is None or change.way == "in-weights" else times_of(change)
        selection = scores if added is None else scores + added * times
        ids = self._choose(selection, changes)
        source = selection if change is not None and change.way == "in-weights" else scores
        if "score" in changes and changes["score"].way == "of-choices":
            chosen = logits.gather(-1, ids).softmax(-1)
        else:
            chosen = source.gather(-1, ids)
        return self._weigh(chosen, changes)

    def _score(self, logits: Tensor, changes: Mapping[str, Change]) -> Tensor:
        way = changes["score"].way if "score" in changes else self.spec.score
        ways: dict[str, Callable[[], Tensor]] = {
            "sigmoid": logits.sigmoid,
            "logits": lambda: logits,
            "softmax-twice": lambda: logits.softmax(-1).softmax(-1),
        }
        return ways[way]() if way in ways else logits.softmax(-1)

    def _choose(self, selection: Tensor, changes: Mapping[str, Change]) -> Tensor:
        spec, groups = self.spec, changes.get("groups")
        if spec.top_groups != spec.num_groups and not (groups is not None and groups.way == "none"):
            grouped = selection.view(*selection.shape[:-1], spec.num_groups, -1)
            kind = spec.group_score if groups is None else groups.way
            width = 1 if kind == "max" else min(2, grouped.shape[-1])
            best, _ = take_best(grouped.topk(width, dim=-1).values.sum(-1), spec.top_groups)
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
            selection = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        order = selection.argsort(dim=-1, descending=True, stable=True)
        ids, way = order[..., : spec.top_k], changes["order"].way if "order" in changes else ""
        ways = {
            "reversed": lambda: ids.flip(-1),
            "worst": lambda: order[..., -spec.top_k :].flip(-1),
            "next": lambda: order[..., 1 : spec.top_k + 1],
        }
        return ways[way]() if way in ways and order.shape[-1] > spec.top_k else ids

    def _weigh(self, chosen: Tensor, changes: Mapping[str, Change]) -> Tensor:
        way = changes["normalization"].way if "normalization" in changes else ""
        is_normalized = self.spec.renormalize if not way else way == "added"
        if way == "softmax":
            chosen = chosen.softmax(-1)
        elif is_normalized:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        change = changes.get("route-scale")
        power = 1 if change is None else {"none": 0, "twice": 2}[change.way]
        return chosen * self.spec.route_scale**power


class ExpertsFormula(TokenFormula):
    """The sum over a token's choices of weight * expert(x): (b, s, H).

    `routing` is the golden's; `expert_ranks` has for each rank its number among those that divide the experts.
    """

    def __init__(
        self, experts: Experts, x: Tensor, routing: Routing, others: Named, expert_ranks: Sequence[int]
    ) -> None:
        super().__init__(x, others)
        self.held = experts.collect_weights()
        ids, num_ranks = routing.ids, max(expert_ranks) + 1
        self.ids, self.weights = ids, routing.weights
        self.expert_ranks, self.num_ranks = expert_ranks, num_ranks
        self.count, self.num_choices = self.held.gate.shape[0], ids.shape[-1]
        ways = [Change(part="weights", way=way) for way in ("none", "equal", "before", "squared", "reversed")]
        ways += [Change(part="weights", way="of-position", number=number) for number in (1, -1)]
        ways += [Change(part="choices", way="without", number=number) for number in range(self.num_choices)]
        ways += [Change(part="choices", way="only", number=number) for number in range(self.num_choices)]
        for way in ("without-rank", "only-rank"):
            ways += [Change(part="choices", way=way, number=number) for number in range(num_ranks)]
        ways += [Change(part="choices", way=way) for way in ("own-rank", "not-own-rank")]
        ways += [Change(part="experts", way="of-expert", number=number) for number in (1, -1)]
        ways += [Change(part="experts", way="of-rank", number=number) for number in (1, -1)]
        ways += [Change(part="experts", way=way) for way in ("reversed", "first-rank", "across", "along")]
        ways += list_activations(has_gate=True)
        if self.held.down_bias is not None:
            ways += [Change(part=part, way="none") for part in ("gate-bias", "up-bias", "down-bias")]
            ways.append(Change(part="down-bias", way="unweighted"))
            self.fits = [
                Change(part=part, way="times", number=2.0) for part in ("gate-bias", "up-bias", "down-bias")
            ]
        self.ways = [*ways, *(way for way in self.ways if way.way != "of-row"), *self._list_capacities()]

    def _list_capacities(self) -> Sequence[Change]:
        """Return how many copies an expert may take before it drops those that come later."""
        counts = torch.bincount(self.ids.flatten(), minlength=self.count)
        most = int(counts.max())
        return [Change(part="choices", way="capacity", number=number) for number in range(1, min(most, 64))]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the combined outputs."""
        ids, weights = self._pick(cell, changes)
        found = torch.zeros(*x.shape[:2], self.held.down.shape[1], dtype=x.dtype)
        is_before = "weights" in changes and changes["weights"].way == "before"
        is_apart = "down-bias" in changes and changes["down-bias"].way == "unweighted"
        for choice in range(self.num_choices):
            weight = weights[..., choice, None]
            out, bias = self._run(x * weight if is_before else x, ids[..., choice], changes)
            out = out if is_apart else out + bias
            found = found + (out * (weight != 0) if is_before else out * weight) + (bias if is_apart else 0.0)
        return found

    def _run(self, x: Tensor, ids: Tensor, changes: Mapping[str, Change]) -> tuple[Tensor, Tensor]:
        """Return the outputs of one choice's experts without their last bias, and that bias; one expert at a time."""
        held = self.held
        outputs = torch.zeros(*ids.shape, held.down.shape[1], dtype=x.dtype)
        biases = torch.zeros_like(outputs)
        for expert in range(self.count):
            chosen = ids == expert
            if not bool(chosen.any()):
                continue
            gate, up = x[chosen] @ held.gate[expert].T, x[chosen] @ held.up[expert].T
            if held.gate_bias is not None and held.up_bias is not None and held.down_bias is not None:
                gate = gate + held.gate_bias[expert] * times_of(changes.get("gate-bias"))
                up = up + held.up_bias[expert] * times_of(changes.get("up-bias"))
                change = changes.get("down-bias")
                is_whole = change is None or change.way == "unweighted"
                biases[chosen] = held.down_bias[expert] * (1.0 if is_whole else times_of(change))
            outputs[chosen] = activate(gate, up, changes) @ held.down[expert].T
        return outputs, biases

    def _pick(self, cell: Cell, changes: Mapping[str, Change]) -> tuple[Tensor, Tensor]:
        """Return the experts (b, s, k) of the cell's tokens, and the weights of their outputs."""
        ids, weights = (each[cell.rows][:, cell.positions] for each in (self.ids, self.weights))
        weight, choice, expert = (changes.get(part) for part in ("weights", "choices", "experts"))
        if weight is not None:
            shifted = self.weights.roll(-int(weight.number or 0), 1)[cell.rows][:, cell.positions]
            ways: dict[str, Callable[[], Tensor]] = {
                "none": lambda: torch.ones_like(weights),
                "equal": lambda: torch.full_like(weights, 1.0 / self.num_choices),
                "squared": weights.square,
                "reversed": lambda: weights.flip(-1),
                "of-position": lambda: shifted,
            }
            weights = ways[weight.way]() if weight.way in ways else weights
        if choice is not None:
            weights = weights * self._keep(choice, ids, cell)
        return ids if expert is None else self._renumber(ids, expert), weights

    def _keep(self, choice: Change, ids: Tensor, cell: Cell) -> Tensor:
        """Return which choices (b, s, k) of a cell count."""
        number, place = int(choice.number or 0), torch.arange(self.num_choices)
        owner = ids // max(self.count // self.num_ranks, 1)
        ways = {
            "without": lambda: (place != number).expand_as(ids),
            "only": lambda: (place == number).expand_as(ids),
            "without-rank": lambda: owner != number,
            "only-rank": lambda: owner == number,
            "own-rank": lambda: owner == self.expert_ranks[cell.rank],
            "not-own-rank": lambda: owner != self.expert_ranks[cell.rank],
        }
        if choice.way in ways:
            return ways[choice.way]()
        flat = torch.nn.functional.one_hot(self.ids.flatten(), self.count)
        place_of = (flat.cumsum(0) * flat).sum(-1).view_as(self.ids)
        return (place_of <= number)[cell.rows][:, cell.positions]

    def _renumber(self, ids: Tensor, change: Change) -> Tensor:
        """Return the experts that compute in the place of others."""
        number, per_rank = int(change.number or 0), max(self.count // self.num_ranks, 1)
        ways = {
            "of-expert": lambda: (ids + number) % self.count,
            "of-rank": lambda: (ids + number * per_rank) % self.count,
            "reversed": lambda: self.count - 1 - ids,
            "first-rank": lambda: ids % per_rank,
            "across": lambda: ids % self.num_ranks * per_rank + ids // self.num_ranks,
            "along": lambda: ids % per_rank * self.num_ranks + ids // per_rank,
        }
        return ways[change.way]()
