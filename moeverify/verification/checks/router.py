"""Check each reference router's choices, weights and counts against its own inputs and parameters.

Where scores are nearly equal, the comparison with the golden accepts other chosen experts, within the noise
of everything before the router. This check is independent of that noise. It recomputes the scores in
float64 from the router's own input. The remaining difference is the rounding of the router, which computes
in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeverify.cases.schema import MoE
from moeverify.model.precision import widen
from moeverify.model.router import Router, RouterRecord, Routing
from moeverify.parallel.regions.placement import local_part
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import RouterFacts
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.place import Place, Stage
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import Check, CheckOutcome, RankRun, Role, ShownTensors, Watch
from moeverify.verification.checks.router_passes import RouterPasses
from moeverify.verification.checks.wide_parts import split_wide

MOST_TOKENS = 1 << 12
"""Maximum number of evenly spaced tokens scored again per pass. Counts cover all tokens."""

_QUANTITIES = ("choice", "weights", "counts")
_KINDS: Mapping[str, Kind] = {
    "choice": Kind.ROUTER_IDS,
    "weights": Kind.ROUTER_WEIGHTS,
    "counts": Kind.ROUTER_COUNTS,
}


@dataclass(frozen=True)
class Scored:
    """Logits and scores (N, E) of tokens in float64, and bounds (N, 1) on the router's own errors.

    `error` bounds the absolute error of the logits, `relative` the relative error of the scores.
    """

    logits: Tensor
    error: Tensor
    scores: Tensor
    relative: Tensor

    @classmethod
    def compute(cls, spec: MoE, x: Tensor, weight: Tensor, bias: Tensor | None) -> Scored:
        """Return the scores of x (N, H). The router's compute dtype follows from the dtype of x."""
        unit = 0.5 * torch.finfo(widen(x.dtype)).eps
        logits, error = compute_logits(x, weight, bias)
        if spec.score == "sigmoid":
            return cls(logits, error, logits.sigmoid(), error + 8.0 * unit)
        # All logits may be off, in different directions, and E exponentials are summed.
        relative = 2.0 * error + (8.0 + logits.shape[-1]) * unit
        return cls(logits, error, logits.softmax(dim=-1), relative)


def compute_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logits (N, E) of x (N, H) in float64, and a bound (N, 1) on the router's error."""
    unit = 0.5 * torch.finfo(widen(x.dtype)).eps
    logits = torch.empty(len(x), len(weight), dtype=torch.float64, device=x.device)
    sizes, weight_sizes = torch.empty_like(logits), weight.abs()
    for tokens, wide in split_wide(x):
        torch.mm(wide, weight.T, out=logits[tokens])
        torch.mm(wide.abs(), weight_sizes.T, out=sizes[tokens])
    if bias is not None:
        logits, sizes = logits + bias, sizes + bias.abs()
    # A product is summed in vectors and blocks, whose rounding errors add up like a random walk.
    return logits, unit * (4.0 * x.shape[-1] ** 0.5 + 8.0) * sizes.amax(dim=-1, keepdim=True)


def choose_experts(spec: MoE, selection: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen experts (N, E) and the smallest change of scores (N) that would alter the choice.

    `selection` (N, E) are the scores that the choice compares.

    Source: DeepSeek-V2, section 2.1.2 (groups by their best expert); DeepSeek-V3 (by the sum of their best
    two).
    """
    margin = torch.full_like(selection[:, 0], torch.inf)
    if spec.top_groups < spec.num_groups:
        groups = selection.reshape(len(selection), spec.num_groups, -1)
        width = 1 if spec.group_score == "max" else min(2, groups.shape[-1])
        rated = groups.topk(width, dim=-1).values.sum(dim=-1)
        best = rated.topk(spec.top_groups + 1, dim=-1)
        # Group scores are sums of `width` scores, so their error is `width` times as large.
        margin = (best.values[:, -2] - best.values[:, -1]) / width
        kept = torch.zeros_like(rated, dtype=torch.bool).scatter(-1, best.indices[:, :-1], True)
        selection = groups.where(kept.unsqueeze(-1), -torch.inf).flatten(-2)
    if spec.top_k < selection.shape[-1]:
        best = selection.topk(spec.top_k + 1, dim=-1)
        margin = torch.minimum(margin, best.values[:, -2] - best.values[:, -1])
        ids = best.indices[:, :-1]
    else:
        ids = selection.topk(spec.top_k, dim=-1).indices
    return torch.zeros_like(selection, dtype=torch.bool).scatter(-1, ids, True), margin


def count_wrong(
    router: Router, weight: Tensor, x: Tensor, valid: Tensor | None, routing: Routing, record: RouterRecord
) -> Tensor:
    """Return the number and size of errors in one forward pass.

    Shapes: x (B, S, H); the result (2, 3) is float64 on the router's device. The columns are choice,
    weights and counts: the number of wrong tokens (or experts), and the largest ratio of a difference to
    its rounding bound.
    """
    spec = router.spec
    flat = x.flatten(0, -2)
    stride = -(-len(flat) // MOST_TOKENS)
    tokens = flat[::stride]
    bias = None if router.bias is None else local_part(router.view(router.bias)).to(torch.float64)
    scored = Scored.compute(spec, tokens, weight, bias)
    selection = scored.scores
    if router.selection_bias is not None:
        selection = selection + router.selection_bias.to(torch.float64)
    chosen, margin = choose_experts(spec, selection)
    # Two exchanged scores are each off by at most the error of the largest. `relative` also covers the
    # rounding of the sum with the selection bias.
    largest_size = torch.maximum(scored.scores.amax(dim=-1), selection.abs().amax(dim=-1))
    tolerance = 2.0 * scored.relative.squeeze(-1) * largest_size
    ids = record.ids.flatten(0, -2)[::stride]
    times = torch.ones_like(ids, dtype=selection.dtype)
    actual_choice = torch.zeros_like(selection).scatter_add(-1, ids, times)
    other = (actual_choice != chosen).any(dim=-1)
    excess = torch.where(other, margin / tolerance, 0.0)

    used = routing.ids.flatten(0, -2)[::stride]
    weights = _weigh(spec, scored, used)
    actual = routing.weights.detach().flatten(0, -2)[::stride].to(torch.float64)
    unit = 0.5 * torch.finfo(routing.weights.dtype).eps
    allowed = weights * (unit + 2.0 * scored.relative) + torch.finfo(routing.weights.dtype).tiny
    deviation = ((actual - weights).abs() / allowed).amax(dim=-1)

    miscounted = (record.counts - _count(routing.ids, valid, len(weight))).abs().to(torch.float64)
    # NaN counts as wrong, since no comparison holds for it. But tokens whose recomputed logits are not
    # finite are skipped: their error arose before the router.
    known = scored.logits.isfinite().all(dim=-1)
    ratios = [torch.where(known, each.nan_to_num(torch.inf), 0.0) for each in (excess, deviation)]
    numbers = [(each > 1.0).sum() for each in ratios] + [(miscounted != 0).sum()]
    largest = [each.amax() for each in (*ratios, miscounted)]
    return torch.stack([torch.stack(numbers).to(torch.float64), torch.stack(largest)])


def _weigh(spec: MoE, scored: Scored, used: Tensor) -> Tensor:
    """Return the weights (N, k) of the experts `used` (N, k) by the recipe."""
    weights = scored.scores.gather(-1, used)
    if spec.renormalize:
        # 1e-20 as in the router: without it, underflow of all chosen scores would give 0 / 0.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * spec.route_scale


def _count(ids: Tensor, valid: Tensor | None, num_experts: int) -> Tensor:
    """Return the number of valid tokens of each expert, (E)."""
    # Each choice counts 1, or 0 for padding: removing padding would synchronize with the GPU.
    times = torch.ones_like(ids) if valid is None else valid.unsqueeze(-1).expand_as(ids)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=times.device)
    return counts.index_add_(0, ids.flatten(), times.flatten().to(torch.int64))


@dataclass(frozen=True)
class RouterErrors:
    """Errors of one rank's router in a step: for choice, weights and counts the number and largest ratio."""

    num_tokens: int
    num_experts: int
    num_wrong: tuple[int, ...]
    largest: tuple[float, ...]


Reports = dict[tuple[int, str], RouterErrors]  # by step and router


class RouterWatch(RouterPasses[Reports]):
    """Scores the tokens of each forward pass again on the router's device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._seen: dict[tuple[int, str], list[Tensor]] = {}
        self._sizes: dict[tuple[int, str], tuple[int, int]] = {}

    def report(self) -> Reports:
        """Return the errors of each step; see `Watch`."""
        return {key: _join(seen, self._sizes[key]) for key, seen in self._seen.items()}

    def see(
        self, name: str, router: Router, weight: Tensor, x: Tensor, valid: Tensor | None, routing: Routing
    ) -> None:
        """Count the errors of one pass; see `RouterPasses`."""
        assert router.record is not None
        key = (self.step, name)
        found = count_wrong(router, weight, x, valid, routing, router.record)
        self._seen.setdefault(key, []).append(found)
        tokens, experts = self._sizes.get(key, (0, 0))
        num_tokens = x.flatten(0, -2).shape[0]
        self._sizes[key] = (tokens + -(-num_tokens // -(-num_tokens // MOST_TOKENS)), experts + len(weight))


def _join(seen: Sequence[Tensor], size: tuple[int, int]) -> RouterErrors:
    found = torch.stack(list(seen))
    num_wrong = tuple(map(int, found[:, 0].sum(dim=0).tolist()))
    return RouterErrors(*size, num_wrong, tuple(found[:, 1].amax(dim=0).tolist()))


class RouterChoice(Check[Reports]):
    """Routers of the reference model, on every rank. Other routers do not expose their inputs."""

    name = CheckName.ROUTER
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[Reports] | None:
        """Return a watch that scores tokens again; see `Check`."""
        routers = any(isinstance(module, Router) for module in program.model.modules())
        # Every rank of the layout must report, also a pipeline stage without routers.
        return RouterWatch(program.model) if routers or run.case.layout.pp > 1 else None

    def judge(self, shown: ShownTensors, reports: Sequence[Reports]) -> CheckOutcome | None:
        """Return whether each router follows from its scores; see `Check`."""
        return judge_routers(shown, reports) if any(reports) else None


def judge_routers(shown: ShownTensors, reports: Sequence[Reports]) -> CheckOutcome:
    """Return the verdict, with a finding for each wrong quantity of a router in a step."""
    findings: list[Finding] = []
    worst: Worst | None = None
    keys = sorted(set().union(*reports))
    for key in keys:
        rows = {rank: report[key] for rank, report in enumerate(reports) if key in report}
        for number, quantity in enumerate(_QUANTITIES[:2]):
            ratio = max(row.largest[number] for row in rows.values())
            if worst is None or ratio > worst.error:
                worst = Worst(tensor=f"{key[1]} {quantity}", error=ratio, bound=1.0, step=key[0])
        findings += _list_findings(shown, key, rows)
    result = CheckResult(
        name=CheckName.ROUTER, verdict="mismatch" if findings else "pass", tensors=3 * len(keys), worst=worst
    )
    return CheckOutcome(result, tuple(findings))


def _list_findings(
    shown: ShownTensors, key: tuple[int, str], rows: Mapping[int, RouterErrors]
) -> Iterator[Finding]:
    step, name = key
    for number, quantity in enumerate(_QUANTITIES):
        wrong = tuple(rank for rank, row in rows.items() if row.num_wrong[number])
        if not wrong:
            continue
        rank = max(wrong, key=lambda each: rows[each].num_wrong[number])
        size = rows[rank].num_experts if quantity == "counts" else rows[rank].num_tokens
        largest = max(rows[each].largest[number] for each in wrong)
        yield shown.make_finding(
            CheckName.ROUTER,
            (step, _KINDS[quantity], name),
            wrong,
            rank=rank,
            error=largest,
            bound=0.0 if quantity == "counts" else 1.0,
            # As in a diagnosis of a difference from the golden: weights are computed, a choice is made.
            code=Cause.FORWARD if quantity == "weights" else Cause.ROUTING,
            facts=RouterFacts(
                quantity=quantity,  # type: ignore[arg-type]
                num_wrong=rows[rank].num_wrong[number],
                num_tokens=size,
                margin=largest if quantity == "choice" else None,
            ),
            place=Place(module=name, ranks=wrong, stage=Stage.ROUTING),
        )


CHECKS = (RouterChoice(),)
