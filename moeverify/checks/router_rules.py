"""Other rules by which routers choose and weigh experts, as implementations have them or had them by mistake.

Each is compared with what a router did, on its own input. Letters: N tokens, E experts, G groups, k choices.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moeverify.case.schema import MoE
from moeverify.results.facts import ChoiceRule, WeightRule


def list_choice_rules(spec: MoE, *, has_bias: bool) -> list[ChoiceRule]:
    """Return the rules by which experts may be chosen otherwise, that are other ones here."""
    found: list[ChoiceRule] = []
    if spec.top_groups < spec.num_groups:
        found += ["masked-by-zero", "without-groups", "sum-of-group"]
        found.append("groups-by-two" if spec.group_score == "max" else "groups-by-best")
        if has_bias:
            found += ["groups-without-bias", "experts-without-bias"]
    return [*found, "without-bias", "opposite-bias"] if has_bias else found


def choose_by(rule: ChoiceRule, spec: MoE, scores: Tensor, selection: Tensor) -> Tensor:
    """Return which experts (N, E) a rule chooses by their scores, without and with the selection bias (N, E)."""
    rated, chosen = selection, selection
    if rule == "without-bias":
        rated = chosen = scores
    elif rule == "opposite-bias":
        rated = chosen = 2.0 * scores - selection
    elif rule == "groups-without-bias":
        rated = scores
    elif rule == "experts-without-bias":
        chosen = scores
    if spec.top_groups < spec.num_groups and rule != "without-groups":
        allowed = _allow(rule, spec, rated)
        chosen = chosen.where(allowed, 0.0 if rule == "masked-by-zero" else -torch.inf)
    # Of equal ones, such as zeros, the first, as a stable sort has it.
    ids = chosen.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    return torch.zeros_like(chosen, dtype=torch.bool).scatter(-1, ids, True)


def _allow(rule: str, spec: MoE, rated: Tensor) -> Tensor:
    """Return the experts (N, E) of the groups that are taken."""
    groups = rated.reshape(len(rated), spec.num_groups, -1)
    is_max = (spec.group_score == "max") != (rule in ("groups-by-two", "groups-by-best"))
    width = 1 if is_max else min(2, groups.shape[-1])
    width = groups.shape[-1] if rule == "sum-of-group" else width
    best = groups.topk(width, dim=-1).values.sum(dim=-1).topk(spec.top_groups, dim=-1).indices
    kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=rated.device).scatter(-1, best, True)
    return kept.unsqueeze(-1).expand_as(groups).flatten(-2)


def list_weight_rules(spec: MoE, *, has_bias: bool) -> list[WeightRule]:
    """Return the rules by which experts may be weighed otherwise, that are other ones here."""
    found: list[WeightRule] = ["softmax-scores" if spec.score == "sigmoid" else "sigmoid-scores"]
    if spec.top_k > 1:  # the one weight of a token is 1 by several rules
        is_softmax = spec.score == "softmax"
        found.append("not-normalized" if spec.renormalize else "of-chosen" if is_softmax else "normalized")
    if spec.top_groups < spec.num_groups and spec.score == "softmax" and not spec.renormalize:
        found.append("of-allowed")
    if spec.route_scale != 1.0:
        found += ["scale-twice", "without-scale"]
    return [*found, "with-bias"] if has_bias else found


def weigh_by(
    rule: WeightRule, spec: MoE, logits: Tensor, scores: Tensor, selection: Tensor, used: Tensor
) -> Tensor:
    """Return the weights (N, k) that a rule gives to the experts `used` (N, k), by logits and scores (N, E)."""
    if rule == "softmax-scores":
        scores = logits.softmax(dim=-1)
    elif rule == "sigmoid-scores":
        scores = logits.sigmoid()
    elif rule == "of-allowed":
        scores = logits.where(_allow(rule, spec, selection), -torch.inf).softmax(dim=-1)
    elif rule == "with-bias":
        scores = selection
    weights = scores.gather(-1, used)
    if spec.renormalize != (rule in ("normalized", "not-normalized", "of-chosen")):
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    power = {"scale-twice": 2, "without-scale": 0}.get(rule, 1)
    return weights * spec.route_scale**power


def compare_choices(
    spec: MoE, scores: Tensor, selection: Tensor | None, actual: Tensor, wrong: Tensor
) -> Iterator[Tensor]:
    """Yield for each rule how many tokens get other experts than `actual` (N, E), in all and of the `wrong` (N)."""
    biased = scores if selection is None else selection
    for rule in list_choice_rules(spec, has_bias=selection is not None):
        other = (choose_by(rule, spec, scores, biased) != actual).any(dim=-1)
        yield torch.stack([other.sum(), (other & wrong).sum()])
