"""Alternative rules by which a router may choose and weigh experts, built from variants of parts.

A rule replaces one, two or three parts of the right rule by variants (`ways` in the code). Each rule is
compared with the router's results on its own input, and only if these are wrong. Letters: N tokens, E
experts, G groups, k choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from moeverify.cases.schema import MoE

MOST_UNLIKE = 0.02
"""Largest share of tokens that may deviate from a rule: float32 may move a score past a rounding boundary."""

_MOST_ALIKE = 3
"""If more rules give the same result, none is reported."""

_MOST_WAYS = 3
"""Maximum number of parts that a rule replaces."""

_TRIED, _ROUNDS = 41, 12  # of a temperature: candidates, and iterations from the best one

_WITH_BIAS = "with-bias"

_EXACT = 1e-9
"""Relative error below which scores count as float64."""

BEST = "best-"
"""Prefix of choices with other numbers: `best-5` experts, `best-1-in-2` choices, `best-1-to-5` per token."""

_SMALL = 1e-20  # a router adds this to the sum by which it divides weights


@dataclass(frozen=True)
class RouterSample:
    """Some tokens of a router: the recomputed scores, and its choices and weights.

    - `logits`, `scores`, `selection` (the scores plus the selection bias): (N, E).
    - `chosen`: (N, E), how often each expert was chosen.
    - `relative`: (N, 1), the largest relative error of a score.
    - `used`, `weights`: (N, k).
    - `is_chosen_wrong`, `is_weighed_wrong`: (N).
    - `unit`: the rounding of the weights.
    """

    logits: Tensor
    scores: Tensor
    relative: Tensor
    selection: Tensor
    chosen: Tensor
    used: Tensor
    weights: Tensor
    is_chosen_wrong: Tensor
    is_weighed_wrong: Tensor
    unit: float

    def take(self, most: int) -> RouterSample:
        """Return at most `most` evenly spaced tokens."""
        every = slice(None, None, -(-len(self.logits) // most))
        return RouterSample(**{name: each[every] for name, each in self._list().items()}, unit=self.unit)

    def join(self, other: RouterSample) -> RouterSample:
        """Return the tokens of both samples."""
        parts = other._list()
        joined = {name: torch.cat([each, parts[name]]) for name, each in self._list().items()}
        return RouterSample(**joined, unit=max(self.unit, other.unit))

    def _list(self) -> dict[str, Tensor]:
        return {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}


@dataclass(frozen=True)
class Named:
    """Rules that explain a router's results, each with the number it was solved for, if any."""

    rules: Mapping[str, float | None]


def name_choices(spec: MoE, sample: RouterSample, *, has_bias: bool) -> Named:
    """Return the rules that explain the choices: of all wrong tokens, and of nearly all others."""
    if not bool(sample.is_chosen_wrong.any()):
        return Named({})
    counted = name_numbers(spec, sample)
    if counted is not None:
        return Named({counted: float(spec.top_k)} if counted else {})
    parts = list_choice_parts(spec, has_bias=has_bias)

    def fits(ways: Collection[str]) -> bool:
        other = (choose_by(ways, spec, sample) != (sample.chosen > 0.0)).any(dim=-1)
        return not bool((other & sample.is_chosen_wrong).any()) and _are_few(other, sample)

    return Named(dict.fromkeys(_find(parts, lambda ways: 1.0 if fits(ways) else None)))


def name_numbers(spec: MoE, sample: RouterSample) -> str | None:
    """Return the name of a choice with a wrong number of experts or choices per token.

    Return None if each token has the right number of different experts. Return an empty string if they are
    not the best.
    """
    experts, choices = (sample.chosen > 0.0).sum(dim=-1), sample.chosen.sum(dim=-1).round().long()
    if bool((experts == spec.top_k).all()) and bool((choices == spec.top_k).all()):
        return None
    selection = sample.selection
    if spec.top_groups < spec.num_groups:
        selection = selection.where(_allow((), spec, selection), -torch.inf)
    order = selection.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    best = torch.zeros_like(order).scatter(-1, order, ranks) < experts.unsqueeze(-1)
    if not _are_few((best != (sample.chosen > 0.0)).any(dim=-1), sample):
        return ""
    (least, most), (fewest, many) = (each.aminmax() for each in (experts, choices))
    if int(fewest) != int(many):
        return "" if bool((choices != experts).any()) else f"{BEST}{int(least)}-to-{int(most)}"
    if int(least) != int(most):
        return ""
    return f"{BEST}{int(least)}" + (f"-in-{int(many)}" if int(many) != int(least) else "")


def name_weights(spec: MoE, sample: RouterSample, *, has_bias: bool) -> Named:
    """Return the rules that explain the weights."""
    if _are_few(sample.is_weighed_wrong, sample):
        return Named({})

    def fit(ways: Collection[str]) -> float | None:
        made, number = weigh_by(ways, spec, sample)
        room = 2.0 if number is None else 4.0
        allowed = made.abs() * (sample.unit + room * sample.relative) + 2.0 * sample.unit**2
        other = ~((sample.weights - made).abs() <= allowed)
        if not _are_few(other.any(dim=-1), sample):
            return None
        return 0.0 if number is None else number

    found = _find(list_weight_parts(spec, has_bias=has_bias), fit)
    return Named({rule: number if number else None for rule, number in found.items()})


def leave_out_bias(rule: str) -> str:
    """Return a rule of weights as it appears while the selection bias is zero."""
    return "+".join(way for way in rule.split("+") if way != _WITH_BIAS)


def _find(
    parts: Mapping[str, Sequence[str]], fit: Callable[[Collection[str]], float | None]
) -> dict[str, float]:
    """Return the rules with one way that fit, else with two, else with three; none if too many fit."""
    for count in (1, 2, _MOST_WAYS):
        found = {
            "+".join(ways): number
            for ways in _list_ways(parts, count)
            if (number := fit(frozenset(ways))) is not None
        }
        # Prefer rules without a fitted number.
        found = {rule: number for rule, number in found.items() if not number} or found
        if found:
            return found if len(found) <= _MOST_ALIKE else {}
    return {}


def _list_ways(parts: Mapping[str, Sequence[str]], count: int) -> Iterator[tuple[str, ...]]:
    for names in combinations(parts, count):
        yield from product(*(parts[name] for name in names))


def _are_few(tokens: Tensor, sample: RouterSample) -> bool:
    """Return whether few enough tokens (N) deviate: up to a small share in float32, none in float64."""
    is_exact = float(sample.relative.amax()) < _EXACT
    return float(tokens.sum()) <= (0.0 if is_exact else MOST_UNLIKE * len(tokens))


def list_choice_parts(spec: MoE, *, has_bias: bool) -> Mapping[str, Sequence[str]]:
    """Return the parts of a choice, with the variants that differ for this recipe."""
    parts: dict[str, list[str]] = {"order": ["worst"], "tokens": ["of-token-before", "of-token-after"]}
    if spec.top_groups < spec.num_groups:
        rated = ["groups-by-two" if spec.group_score == "max" else "groups-by-best"]
        parts["rate"] = [*rated, "sum-of-group", "groups-by-worst"]
        parts["mask"] = ["masked-by-zero", "without-groups"]
        # The k best experts are in at most k groups, so more groups give the same choice.
        most = min(spec.num_groups - 1, spec.top_k - 1)
        parts["count"] = [f"groups-{count}" for count in range(1, most + 1) if count != spec.top_groups]
    if has_bias:
        parts["bias"] = ["without-bias", "opposite-bias", "bias-twice", "bias-on-logits"]
        if spec.top_groups < spec.num_groups:
            parts["bias"] += ["groups-without-bias", "experts-without-bias"]
    if has_bias or spec.top_groups < spec.num_groups:  # else scores have the order of logits
        parts["score"] = ["chosen-by-logits", "chosen-by-other-score"]
    return parts


def choose_by(ways: Collection[str], spec: MoE, sample: RouterSample) -> Tensor:
    """Return the experts (N, E) chosen by a rule with these ways."""
    bias = sample.selection - sample.scores
    scores = sample.scores
    if "chosen-by-logits" in ways:
        scores = sample.logits
    elif "chosen-by-other-score" in ways:
        scores = _other_score(spec, sample.logits)
    elif "bias-on-logits" in ways:
        scores, bias = _score(spec, sample.logits + bias), bias * 0.0
    times = {"without-bias": 0.0, "opposite-bias": -1.0, "bias-twice": 2.0}
    factor = next((value for name, value in times.items() if name in ways), 1.0)
    rated = scores + (0.0 if "groups-without-bias" in ways else factor) * bias
    chosen = scores + (0.0 if "experts-without-bias" in ways else factor) * bias
    if spec.top_groups < spec.num_groups and "without-groups" not in ways:
        allowed = _allow(ways, spec, rated)
        chosen = chosen.where(allowed, 0.0 if "masked-by-zero" in ways else -torch.inf)
        if "worst" in ways:
            chosen = chosen.where(allowed, torch.inf)
    # Among equal scores, such as zeros, the first one, as in a stable sort.
    ids = chosen.sort(dim=-1, descending="worst" not in ways, stable=True).indices[:, : spec.top_k]
    found = torch.zeros_like(chosen, dtype=torch.bool).scatter(-1, ids, True)
    shift = 1 if "of-token-before" in ways else -1 if "of-token-after" in ways else 0
    return found.roll(shift, dims=0)


def _allow(ways: Collection[str], spec: MoE, rated: Tensor) -> Tensor:
    """Return a mask (N, E) of the experts in the selected groups."""
    groups = rated.reshape(len(rated), spec.num_groups, -1)
    is_max = (spec.group_score == "max") != bool({"groups-by-two", "groups-by-best"} & set(ways))
    width = 1 if is_max else min(2, groups.shape[-1])
    width = groups.shape[-1] if "sum-of-group" in ways else width
    rates = groups.topk(width, dim=-1).values.sum(dim=-1)
    rates = groups.amin(dim=-1) if "groups-by-worst" in ways else rates
    counts = [int(way.removeprefix("groups-")) for way in ways if way.removeprefix("groups-").isdigit()]
    best = rates.topk(counts[0] if counts else spec.top_groups, dim=-1).indices
    kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=rated.device).scatter(-1, best, True)
    return kept.unsqueeze(-1).expand_as(groups).flatten(-2)


def list_weight_parts(spec: MoE, *, has_bias: bool) -> Mapping[str, Sequence[str]]:
    """Return the parts of the weights, with the variants that differ for this recipe."""
    is_softmax, has_groups = spec.score == "softmax", spec.top_groups < spec.num_groups
    score = ["sigmoid-scores" if is_softmax else "softmax-scores", "scores-again", "logits-as-weights"]
    score += ["other-temperature", *(["bias-in-logits"] if has_bias else [])]
    bias = [_WITH_BIAS] if has_bias else []
    divide: list[str] = []
    if has_groups and is_softmax and not spec.renormalize:
        score.append("of-allowed")
    if spec.top_k > 1:  # with k = 1 several rules give a weight of 1
        score += ["equal-weights", "softmax-of-chosen-scores"]
        # A softmax of the chosen logits equals their softmax scores divided by their sum.
        divide.append("not-normalized" if spec.renormalize else "of-chosen" if is_softmax else "normalized")
        divide += ["divided-by-root-of-squares", "divided-by-best", "divided-by-one-more"]
        if not is_softmax:
            score.append("softmax-of-chosen")
    if spec.renormalize:
        divide.append("other-epsilon")
    if not is_softmax:
        divide.append("divided-by-all")
    scale = ["other-scale"]
    if spec.route_scale != 1.0:
        scale += ["scale-twice", "without-scale", "divided-by-scale"]
    order = ["weights-reversed", "weights-by-id", "weights-of-token-before"] if spec.top_k > 1 else []
    return {"score": score, "bias": bias, "divide": divide, "scale": scale, "order": order}


def weigh_by(ways: Collection[str], spec: MoE, sample: RouterSample) -> tuple[Tensor, float | None]:
    """Return the weights (N, k) by a rule with these ways, and the number it was solved for."""
    number = None
    if "other-temperature" in ways:
        number = _find_temperature(spec, sample)
    weights = _list_scores(ways, spec, sample, number).gather(-1, sample.used)
    if "softmax-of-chosen" in ways:
        weights = sample.logits.gather(-1, sample.used).softmax(dim=-1)
    if "softmax-of-chosen-scores" in ways:
        weights = weights.softmax(dim=-1)
    weights = _order(ways, weights, sample.used)
    power = 2 if "scale-twice" in ways else 0 if "without-scale" in ways else 1
    power = -1 if "divided-by-scale" in ways else power
    scale = spec.route_scale**power
    if "other-epsilon" in ways:
        # weight * (sum + eps) = scale * score, solved for eps.
        left = scale * weights - sample.weights * weights.sum(dim=-1, keepdim=True)
        number = float((left * sample.weights).sum() / sample.weights.square().sum())
        return scale * weights / (weights.sum(dim=-1, keepdim=True) + number), number
    weights = weights / _divide(ways, spec, sample, weights)
    if "other-scale" in ways:
        number = float((sample.weights * weights).sum() / weights.square().sum())
        return number * weights, number
    return scale * weights, number


def _list_scores(ways: Collection[str], spec: MoE, sample: RouterSample, temperature: float | None) -> Tensor:
    logits, scores = sample.logits, sample.scores
    made: dict[str, Callable[[], Tensor]] = {
        "softmax-scores": lambda: logits.softmax(dim=-1),
        "sigmoid-scores": logits.sigmoid,
        "scores-again": lambda: _score(spec, scores),
        "logits-as-weights": lambda: logits,
        "of-allowed": lambda: logits.where(_allow((), spec, sample.selection), -torch.inf).softmax(dim=-1),
        "bias-in-logits": lambda: _score(spec, logits + sample.selection - scores),
        "equal-weights": lambda: torch.ones_like(scores),
    }
    made |= {"": lambda: scores if temperature is None else _score(spec, logits * temperature)}
    found = made[next((name for name in made if name in ways), "")]()
    return found + (sample.selection - scores) if _WITH_BIAS in ways else found


def _divide(ways: Collection[str], spec: MoE, sample: RouterSample, weights: Tensor) -> Tensor:
    """Return the divisors (N, 1) of the weights (N, k)."""
    if "divided-by-root-of-squares" in ways:
        return weights.square().sum(dim=-1, keepdim=True).sqrt()
    if "divided-by-best" in ways:
        return weights.amax(dim=-1, keepdim=True)
    if "divided-by-one-more" in ways:
        return sample.scores.topk(min(spec.top_k + 1, spec.num_experts), dim=-1).values.sum(
            dim=-1, keepdim=True
        )
    if "divided-by-all" in ways:
        return sample.scores.sum(dim=-1, keepdim=True)
    if spec.renormalize != bool({"normalized", "not-normalized", "of-chosen"} & set(ways)):
        return weights.sum(dim=-1, keepdim=True) + _SMALL
    return torch.ones_like(weights[:, :1])


def _order(ways: Collection[str], weights: Tensor, used: Tensor) -> Tensor:
    """Return the weights (N, k), reassigned to other choices if the rule does so."""
    if "weights-reversed" in ways:
        return weights.flip(-1)
    if "weights-by-id" in ways:  # sorted by expert index instead of by score
        return weights.gather(-1, used.argsort(dim=-1))
    return weights.roll(1, dims=0) if "weights-of-token-before" in ways else weights


def _find_temperature(spec: MoE, sample: RouterSample) -> float:
    """Return the least-squares factor of the logits, fitted to the weights; NaN if out of range."""

    def measure(number: float) -> Tensor:
        chosen = _score(spec, number * sample.logits).gather(-1, sample.used)
        if spec.renormalize:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + _SMALL)
        return spec.route_scale * chosen - sample.weights

    numbers: list[float] = torch.logspace(-2.0, 2.0, _TRIED, dtype=torch.float64).tolist()
    number = min(numbers, key=lambda each: float(measure(each).square().sum()))
    for _ in range(_ROUNDS):  # Gauss-Newton
        left, near = measure(number), 1e-6 * number
        slope = (measure(number + near) - left) / near
        size = float(slope.square().sum())
        number -= float((left * slope).sum()) / size if size else 0.0
    # Outside this range a softmax has one nonzero score or equal scores, for any number.
    return number if numbers[0] < number < numbers[-1] else math.nan


def _score(spec: MoE, logits: Tensor) -> Tensor:
    return logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(dim=-1)


def _other_score(spec: MoE, logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1) if spec.score == "sigmoid" else logits.sigmoid()
