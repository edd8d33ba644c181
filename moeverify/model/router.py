"""The top-k router: scores, group-limited choice, combine weights, and statistics for the auxiliary losses.

Letters: B rows, S tokens, E experts, G groups of E/G experts, k choices, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeverify.cases.schema import MoE as MoESpec
from moeverify.model.param_access import View, identity
from moeverify.model.precision import Factory, widen
from moeverify.seams import seam


class RouterStats(NamedTuple):
    """Sums over valid tokens for balance loss, z loss and selection bias, not normalized.

    Shapes: probability_sum (B, E) and z_sum () differentiable, in float32 or wider; counts (B, E) int64.
    A token's probabilities are its softmax scores, or its sigmoid scores divided by their sum.
    """

    probability_sum: Tensor
    counts: Tensor
    z_sum: Tensor


class Routing(NamedTuple):
    """The routing of a batch: ids (B, S, k) int64, combine weights (B, S, k) in the dtype of x, and sums."""

    ids: Tensor
    weights: Tensor
    stats: RouterStats


class RouterRecord(NamedTuple):
    """Detached results of the last forward pass. A recomputation overwrites them with equal values.

    `ids` (B, S, k) is the router's own choice, best first, even under a replay. `weights` (B, S, k) and
    `counts` (E) belong to the ids that were used; counts cover valid tokens only. `margin` (B, S) is the
    change of selection scores that would change the choice. It is the k-th score minus the next one, or the
    same difference between groups if that is smaller. It is infinite where there was no alternative.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor
    margin: Tensor


@seam
def take_best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ids (..., count) of the best scores (..., n), best first, and the margin (...) to the next.

    Ties go to the lower id on every device. `torch.topk` does not guarantee this.
    """
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    if count == scores.shape[-1]:
        return order, torch.full_like(values[..., 0], torch.inf)
    return order[..., :count], values[..., count - 1] - values[..., count]


def choose(spec: MoESpec, selection: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids (..., k) chosen by selection scores (..., E), and the margin (...) to another choice."""
    if spec.top_groups == spec.num_groups:
        return take_best(selection, spec.top_k)
    grouped = selection.reshape(*selection.shape[:-1], spec.num_groups, -1)
    width = 1 if spec.group_score == "max" else min(2, grouped.shape[-1])
    group_scores = grouped.topk(width, dim=-1).values.sum(dim=-1)
    groups, group_margin = take_best(group_scores, spec.top_groups)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
    selection = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    ids, margin = take_best(selection, spec.top_k)
    return ids, torch.minimum(margin, group_margin)


class RouterSlot:
    """The attributes of a router that the training loop uses, for the reference and other implementations."""

    spec: MoESpec
    replay: Tensor | None
    record: RouterRecord | None
    selection_bias: Tensor | None


class Router(nn.Module, RouterSlot):
    """A router that scores every expert for every token and chooses top_k, in float32 or wider.

    `selection_bias` (E) is added to the scores only for the choice, never in the combine weights. If
    `replay` (B, S, k) is set, it replaces the choice, and gradients flow through the scores of those ids.

    Source: Shazeer et al. 2017 (top-k gating); DeepSeek-V2, section 2.1.2 (groups); DeepSeek-V3, equations
    12 to 16 (sigmoid scores, selection bias).
    """

    bias: Tensor | None
    selection_bias: Tensor | None

    def __init__(self, hidden: int, spec: MoESpec, factory: Factory) -> None:
        super().__init__()
        self.spec = spec
        self.view: View = identity
        self.replay: Tensor | None = None
        self.record: RouterRecord | None = None
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden, **factory))
        bias = nn.Parameter(torch.zeros(spec.num_experts, **factory)) if spec.router_bias else None
        self.register_parameter("bias", bias)
        biased = spec.selection_bias_rate > 0 or spec.idle_experts > 0
        wide = widen(factory["dtype"])
        selection_bias = (
            torch.zeros(spec.num_experts, dtype=wide, device=factory["device"]) if biased else None
        )
        self.register_buffer("selection_bias", selection_bias)

    @seam
    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """Return the routing of the tokens x (B, S, H). Sums leave out tokens outside `valid` (B, S)."""
        if valid is None:
            valid = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        logits = self.compute_logits(x)
        scores = self.score(logits)
        chosen, margin = self._choose(scores.detach())
        ids = chosen if self.replay is None else self.replay
        weights = self.weigh(scores.gather(-1, ids)).to(x.dtype)
        stats = summarize(logits, self.normalize(scores), ids, valid)
        self.record = RouterRecord(chosen, weights.detach(), stats.counts.sum(dim=0), margin)
        return Routing(ids, weights, stats)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, S, E) of x (B, S, H), in float32 or wider."""
        wide = widen(x.dtype)
        bias = None if self.bias is None else self.view(self.bias).to(wide)
        return functional.linear(x.to(wide), self.view(self.weight).to(wide), bias)

    def score(self, logits: Tensor) -> Tensor:
        """Return the scores (B, S, E) of logits (B, S, E), which determine the choice of experts."""
        return logits.sigmoid() if self.spec.score == "sigmoid" else logits.softmax(dim=-1)

    def normalize(self, scores: Tensor) -> Tensor:
        """Return the experts' probabilities (B, S, E) for scores (B, S, E)."""
        return scores / scores.sum(dim=-1, keepdim=True) if self.spec.score == "sigmoid" else scores

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self.spec, scores if self.selection_bias is None else scores + self.selection_bias)

    @seam
    def weigh(self, chosen_scores: Tensor) -> Tensor:
        """Return the combine weights (B, S, k) for the scores (B, S, k) of the chosen experts."""
        if self.spec.renormalize:
            # The small constant only matters if all chosen sigmoids underflow to 0.
            chosen_scores = chosen_scores / (chosen_scores.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen_scores * self.spec.route_scale


@seam
def summarize(logits: Tensor, probabilities: Tensor, ids: Tensor, valid: Tensor) -> RouterStats:
    """Return the sums of `RouterStats` over valid tokens.

    Shapes: logits and probabilities (B, S, E), ids (B, S, k), valid (B, S).
    Source: Zoph et al. 2022, "ST-MoE", equation 5, before its division by the number of tokens (z_sum).
    """
    # The ids of a token are distinct, so the scatter has no collisions and is deterministic on every
    # device.
    selected = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True)
    counts = (selected & valid.unsqueeze(-1)).sum(dim=1)
    probability_sum = (probabilities * valid.unsqueeze(-1)).sum(dim=1)
    z_sum = (logits.logsumexp(dim=-1).square() * valid).sum()
    return RouterStats(probability_sum, counts, z_sum)
