"""A router's combine weights, forward and backward.

Letters: b rows and s tokens of what is asked for, B and S of the batch, E experts, k choices, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.diagnose.replay.exchange import Call
from moeverify.diagnose.replay.grammar import times_of
from moeverify.diagnose.replay.language import Cell
from moeverify.diagnose.replay.tokenwise import Named, TokenFormula
from moeverify.model.router import Router, take_best
from moeverify.results.change import Change

_OVER_TOKENS = ("over-tokens", "over-rank")


class RouterFormula(TokenFormula):
    """The combine weights (b, s, k) of the chosen experts, best first."""

    def __init__(self, module: Router, x: Tensor, others: Named, calls: Sequence[Call] = ()) -> None:
        super().__init__(x, others)
        self.source = _number_sources(calls, x)
        self.module, self.spec = module, module.spec
        spec, sigmoid = module.spec, module.spec.score == "sigmoid"
        ways = [
            Change(part="score", way="softmax" if sigmoid else "sigmoid"),
            Change(part="score", way="logits"),
        ]
        ways += [Change(part="score", way=way) for way in ("of-choices", "softmax-twice")]
        ways += [Change(part="normalization", way="none" if spec.renormalize else "added")]
        ways.append(Change(part="normalization", way="softmax"))
        ways += [Change(part="normalization", way=way) for way in _OVER_TOKENS[: spec.top_k]]
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
        self.fits = [
            *(Change(part="logits", way="times", number=number) for number in (0.5, 2.0)),
            *self.fits,
        ]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the weights of the experts that are chosen."""
        over = changes.get("normalization")
        if over is not None and over.way in _OVER_TOKENS:
            return self._normalize_over_tokens(x, cell, changes)
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

    def _normalize_over_tokens(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return weights divided by a sum over the tokens of a rank, for each choice or for all of them."""
        inner = {**changes, "normalization": Change(part="normalization", way="none")}
        whole = self.compute(self.x, cell, inner).flatten(0, 1)
        sums = torch.zeros(int(self.source.max()) + 1, whole.shape[-1], dtype=whole.dtype)
        sums = sums.index_add(0, self.source.flatten(), whole)
        if changes["normalization"].way == "over-rank":
            sums = sums.sum(-1, keepdim=True)
        return self.compute(x, cell, inner) / sums[self.source[cell.rows][:, cell.positions]]

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


def _number_sources(calls: Sequence[Call], x: Tensor) -> Tensor:
    """Return for each token (B, S) a number of the rank and micro-batch that routes it, 0 where not known."""
    found = torch.zeros(x.shape[:2], dtype=torch.int64).flatten()
    for number, tokens in enumerate(each for call in calls for each in call):
        found[tokens] = number
    return found.view(x.shape[:2])
