"""Variants of the balance and z loss with other parts in their formulas, on one device.

Implementations differ in three parts. Probabilities: the router's scores before or after normalization,
after another softmax, or of the chosen experts only. Counts: from the choice with or without groups and
selection bias, or replaced by probabilities. Sizes, whose squares the z loss sums: other measures of the
logits.
Letters: B rows, S tokens, E experts, k choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moeverify.case.schema import MoE
from moeverify.model.router import Router, RouterStats, Routing, choose, summarize
from moeverify.results.change import Change

PROBABILITIES, COUNTS, SIZES = "probabilities", "counts", "sizes"


class _Seen(NamedTuple):
    """One pass of a router: logits, scores, probabilities and a 0/1 mask of chosen experts, all (B, S, E)."""

    logits: Tensor
    scores: Tensor
    probabilities: Tensor
    chosen: Tensor


def _of_chosen(seen: _Seen) -> Tensor:
    return seen.probabilities * seen.chosen


def _of_chosen_normalized(seen: _Seen) -> Tensor:
    of_chosen = _of_chosen(seen)
    return of_chosen / of_chosen.sum(dim=-1, keepdim=True)


def _of_any_chosen(seen: _Seen) -> Tensor:
    return (_of_chosen(seen).sum(dim=-1, keepdim=True) / seen.chosen.sum(dim=-1, keepdim=True)).expand_as(
        seen.chosen
    )


def _of_chosen_sigmoid(seen: _Seen) -> Tensor:
    of_chosen = seen.logits.sigmoid() * seen.chosen
    return of_chosen / of_chosen.sum(dim=-1, keepdim=True)


_WAYS: Mapping[str, Callable[[_Seen], Tensor]] = {
    "softmax": lambda seen: seen.logits.softmax(dim=-1),
    "sigmoid": lambda seen: seen.logits.sigmoid() / seen.logits.sigmoid().sum(dim=-1, keepdim=True),
    "squared": lambda seen: seen.probabilities.square(),
    "logarithm": lambda seen: seen.probabilities.log(),
    "undivided": lambda seen: seen.logits.sigmoid(),
    "softmax-again": lambda seen: seen.probabilities.softmax(dim=-1),
    "softmax-of-scores": lambda seen: seen.scores.softmax(dim=-1),
    "logits": lambda seen: seen.logits,
    "chosen": _of_chosen,
    "chosen-normalized": _of_chosen_normalized,
    "chosen-mean": _of_any_chosen,
    "chosen-sum": lambda seen: _of_chosen(seen).sum(dim=-1, keepdim=True).expand_as(seen.chosen),
    "best": lambda seen: seen.probabilities.amax(dim=-1, keepdim=True).expand_as(seen.chosen),
    "chosen-softmax": lambda seen: seen.logits.masked_fill(seen.chosen == 0.0, -torch.inf).softmax(dim=-1),
    "chosen-sigmoid": _of_chosen_sigmoid,
}
_SQUARES: Mapping[str, Callable[[_Seen], Tensor]] = {
    "unsquared": lambda seen: seen.logits.logsumexp(dim=-1),
    "mean-square": lambda seen: seen.logits.square().mean(dim=-1),
    "sum-of-squares": lambda seen: seen.logits.square().sum(dim=-1),
    "largest": lambda seen: seen.logits.amax(dim=-1).square(),
    "log-mean-exp": lambda seen: (seen.logits.logsumexp(dim=-1) - math.log(seen.logits.shape[-1])).square(),
    "log-of-sum": lambda seen: seen.scores.logsumexp(dim=-1).square(),
    "of-chosen": lambda seen: (
        seen.logits.masked_fill(seen.chosen == 0.0, -torch.inf).logsumexp(dim=-1).square()
    ),
    "mean-of-logits": lambda seen: seen.logits.mean(dim=-1).square(),
}
"""Quantities per token that the z loss may sum instead of the squared logsumexp of the logits."""

_RIGHT = {
    # A softmax of the chosen logits equals the chosen probabilities divided by their sum.
    "softmax": ("softmax", "softmax-of-scores", "chosen-softmax"),
    "sigmoid": ("sigmoid", "chosen-sigmoid"),
}
"""By router score: the ways that equal the right one or another way."""


_IN_PLACE = ("probabilities", "detached-probabilities", "uniform")
"""Values that may replace the counts."""


def list_variants(spec: MoE, term: str, num_changes: int) -> Iterator[tuple[Change, ...]]:
    """Yield the variants of a term with one change, or with a change of probabilities and one of counts."""
    if term == "z":
        yield from ((Change(part=SIZES, way=way),) for way in _SQUARES if num_changes == 1)
        return
    ways = [Change(part=PROBABILITIES, way=way) for way in _WAYS if way not in _RIGHT[spec.score]]
    counts = [Change(part=COUNTS, way=way) for way in _list_counts(spec)]
    if num_changes == 1:
        yield from ((change,) for change in (*ways, *counts))
    else:
        yield from ((first, second) for first in ways for second in counts if second.way not in _IN_PLACE)


def _list_counts(spec: MoE) -> Iterator[str]:
    has_groups = spec.top_groups < spec.num_groups
    has_bias = spec.selection_bias_rate > 0 or spec.idle_experts > 0
    if has_groups:
        yield "without-groups"
    if has_bias:
        yield "without-bias"
    if has_groups and has_bias:
        yield "plain"
    if spec.top_k > 1:
        yield "first"
    yield "padded"
    yield from _IN_PLACE


@contextmanager
def vary(model: nn.Module, changes: Sequence[Change]) -> Iterator[None]:
    """Make all routers of a model return the statistics of a variant while the context is open."""
    ways = {change.part: change.way for change in changes}

    def replace_stats(module: nn.Module, args: Any, kwargs: Mapping[str, Any], routing: Routing) -> Routing:
        assert isinstance(module, Router)
        passed = dict(zip(("x", "valid"), args, strict=False)) | dict(kwargs)
        stats = _vary_stats(module, passed["x"], passed.get("valid"), routing, ways)
        return routing._replace(stats=stats)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Router):
                handle = module.register_forward_hook(replace_stats, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _vary_stats(
    router: Router, x: Tensor, valid: Tensor | None, routing: Routing, ways: Mapping[str, str]
) -> RouterStats:
    """Return the statistics of a variant, summed over valid tokens. Shapes: x (B, S, H), valid (B, S)."""
    logits = router.compute_logits(x)
    scores = router.score(logits)
    probabilities = router.normalize(scores)
    chosen = torch.zeros_like(logits).scatter(-1, routing.ids, 1.0)
    everything = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    valid = everything if valid is None else valid
    if PROBABILITIES in ways:
        probabilities = _WAYS[ways[PROBABILITIES]](_Seen(logits, scores, probabilities, chosen))
    ids = _choose_otherwise(router, scores.detach(), routing.ids, ways.get(COUNTS, ""))
    stats = summarize(logits, probabilities, ids, valid)
    if ways.get(COUNTS) == "padded":
        stats = stats._replace(counts=summarize(logits, probabilities, ids, everything).counts)
    if SIZES in ways:
        sizes = _SQUARES[ways[SIZES]](_Seen(logits, scores, probabilities, chosen))
        stats = stats._replace(z_sum=(sizes * valid).sum())
    # Replaced counts are scaled to the same total number of choices.
    shares: Mapping[str, Callable[[], Tensor]] = {
        "probabilities": lambda: router.spec.top_k * stats.probability_sum,
        "detached-probabilities": lambda: router.spec.top_k * stats.probability_sum.detach(),
        "uniform": lambda: stats.counts.double().mean(dim=-1, keepdim=True).expand_as(stats.counts),
    }
    make = shares.get(ways.get(COUNTS, ""))
    return stats if make is None else stats._replace(counts=make())


def _choose_otherwise(router: Router, scores: Tensor, ids: Tensor, way: str) -> Tensor:
    """Return the expert ids (B, S, k) that a variant counts, from scores (B, S, E)."""
    if way == "first":
        return ids[..., :1]
    spec, bias = router.spec, router.selection_bias
    if way in ("without-groups", "plain"):
        spec = spec.model_copy(update={"top_groups": spec.num_groups})
    if way in ("without-bias", "plain"):
        bias = None
    is_other = way in ("without-groups", "without-bias", "plain")
    return choose(spec, scores if bias is None else scores + bias)[0] if is_other else ids
