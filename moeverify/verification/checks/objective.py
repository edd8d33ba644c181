"""Check each rank's reported losses against its own token losses, router inputs and choices.

The comparison with the golden allows a loss the rounding of the whole forward pass, 2^-7 or more in
bfloat16. A wrong divisor, a weighted micro-batch or a balance loss of other counts often changes less. This
check does not depend on the forward pass. It sums the token losses again in float64. It recomputes the z
and balance losses from each router's inputs and choices, and divides by the number of valid tokens in the
recipe's data. The remaining difference is the rounding of the losses, which are computed in float32 or
wider.

A rank does not know which other ranks see the same tokens (tp), or that it sees them twice (recomputation).
For each router and row, the number of valid tokens over all ranks must be an integer multiple m of the
row's. Sums are divided by m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.cases.schema import MoE
from moeverify.model.precision import widen
from moeverify.model.router import Router, Routing
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import ObjectiveFacts
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.part import Part
from moeverify.results.place import Place, Stage
from moeverify.train.program import TrainingProgram
from moeverify.train.reference_subject import ReferenceSubject
from moeverify.verification.checks.base import Check, CheckOutcome, RankRun, Role, ShownTensors, Watch
from moeverify.verification.checks.router import Scored
from moeverify.verification.checks.router_passes import (
    MicroBatchPasses,
    count_times,
    find_lengths,
    list_scopes,
)
from moeverify.verification.checks.wide_parts import split_passes
from moeverify.verification.compare.assembled import Key

LM, BALANCE, Z, TOTAL = "lm", "balance", "z", "total"


@dataclass
class RouterSums:
    """Inputs and choices of one router on a rank in a step, summed in float64.

    - `z`: the number of valid tokens, the sum of their squared logsumexp, and the largest error of that
      sum.
    - `rows`: for each row of the global batch, the valid tokens (1), summed probabilities (E) and counts
      (E), concatenated. If the balance loss covers the whole batch, the only row is 0.
    - `relative`: the largest relative error of a probability.
    - `eps`: the machine epsilon of the router's compute dtype.
    """

    z: Tensor
    rows: dict[int, Tensor] = field(default_factory=dict)
    relative: float = 0.0
    eps: float = 0.0


@dataclass
class LossSums:
    """One rank's step: sums of token losses per region, sums of its routers, and its reported losses."""

    token_losses: dict[str, tuple[float, int]] = field(default_factory=dict)
    routers: dict[str, RouterSums] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    eps: float = 0.0


@dataclass(frozen=True)
class _RouterPass:
    """One forward pass of a router: `z` (3), `rows` (B, 1 + 2E) and `relative` (), on the router's device."""

    name: str
    z: Tensor
    rows: Tensor
    relative: Tensor
    eps: float


class ObjectiveWatch(MicroBatchPasses[dict[int, LossSums], _RouterPass]):
    """Sums token losses and the inputs of the balance and z losses, without device synchronization."""

    def __init__(self, program: TrainingProgram, *, by_row: bool, is_whole: bool) -> None:
        super().__init__(program.model)
        # A layout may define router losses of its own: megablocks' are means over local tokens.
        self._judges_routers = is_whole and program.own_router_losses is None
        self._by_row = by_row
        self._token_losses: dict[int, dict[str, tuple[Tensor, int]]] = {}
        self._losses: dict[int, dict[str, Tensor]] = {}
        self._eps: dict[int, float] = {}

    def see(
        self, name: str, router: Router, weight: Tensor, x: Tensor, valid: Tensor | None, routing: Routing
    ) -> None:
        """Keep the sums of one pass; see `RouterPasses`."""
        if not self._judges_routers:
            return
        if valid is None:
            valid = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        bias = None if router.bias is None else local_part(router.view(router.bias)).to(torch.float64)
        eps = torch.finfo(widen(x.dtype)).eps
        z, rows, relative = _sum_pass(router.spec, x, weight, bias, valid, routing.ids)
        self.keep(_RouterPass(name, z, rows, relative, eps))

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Record token losses and reported losses; see `Watch`."""
        super().observe(step, kind, name, local, region)
        if local is None:
            return
        if kind == Kind.TOKEN_LOSS:
            total = local.detach().to(torch.float64).sum()
            self._token_losses.setdefault(step, {})[region.key] = (total, region.numel)
            self._eps[step] = max(self._eps.get(step, 0.0), torch.finfo(local.dtype).eps)
        elif kind == Kind.LOSS:
            self._losses.setdefault(step, {})[name] = local.detach().clone()

    def report(self) -> dict[int, LossSums]:
        """Return the sums of every step; see `Watch`."""
        steps = sorted({*self._token_losses, *self.passes, *self._losses})
        return {step: self._report_step(step) for step in steps}

    def _report_step(self, step: int) -> LossSums:
        losses = self._token_losses.get(step, {})
        return LossSums(
            {key: (float(total), size) for key, (total, size) in losses.items()},
            self._join_passes(self.passes.get(step, [])),
            {name: float(value) for name, value in self._losses.get(step, {}).items()},
            self._eps.get(step, 0.0),
        )

    def _join_passes(
        self, passes: Sequence[tuple[_RouterPass, Sequence[int] | None]]
    ) -> dict[str, RouterSums]:
        joined: dict[str, RouterSums] = {}
        for each, indices in passes:
            sums = joined.setdefault(each.name, RouterSums(torch.zeros(3, dtype=torch.float64)))
            sums.z += each.z.cpu()
            sums.relative = max(sums.relative, float(each.relative))
            sums.eps = max(sums.eps, each.eps)
            rows = each.rows.cpu()
            if not self._by_row:
                _add_rows(sums, [0], rows.sum(dim=0, keepdim=True))
            elif indices is not None and len(indices) == len(rows):
                _add_rows(sums, indices, rows)
        return joined


def _add_rows(sums: RouterSums, indices: Sequence[int], rows: Tensor) -> None:
    for index, row in zip(indices, rows, strict=True):
        sums.rows[index] = sums.rows[index] + row if index in sums.rows else row


def _sum_pass(
    spec: MoE, x: Tensor, weight: Tensor, bias: Tensor | None, valid: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z (3), rows (B, 1 + 2E) and the largest relative error () of one pass; see `RouterSums`.

    Shapes: x (B, S, H), weight (E, H), valid (B, S), ids (B, S, k).
    """
    num_tokens, num_experts = x.shape[1], weight.shape[0]
    unit = 0.5 * torch.finfo(widen(x.dtype)).eps
    z = torch.zeros(3, dtype=torch.float64, device=x.device)
    relative = torch.zeros((), dtype=torch.float64, device=x.device)
    rows = []
    for part, chosen, kept in split_passes(num_experts * num_tokens, x, ids, valid):
        scored = Scored.compute(spec, part.flatten(0, 1), weight, bias)
        # Padding is masked, not removed: to remove it, a GPU would have to report the number of valid
        # tokens.
        is_valid = kept.flatten()
        sizes = scored.logits.logsumexp(dim=-1)
        # A logsumexp changes by at most the largest change of a logit. Its own rounding covers E
        # exponentials and their sum.
        error = scored.error.squeeze(-1) + unit * (8.0 + num_experts + 2.0 * sizes.abs())
        of_tokens = [
            torch.ones_like(sizes),
            sizes.square(),
            2.0 * sizes.abs() * error + error.square(),
        ]
        z += torch.stack([torch.where(is_valid, each, 0.0).sum() for each in of_tokens])
        probabilities = scored.scores / scored.scores.sum(dim=-1, keepdim=True)
        counts = torch.zeros_like(probabilities)
        picked = chosen.flatten(0, 1)
        counts.scatter_add_(1, picked, torch.ones_like(picked, dtype=torch.float64))
        seen = torch.cat([torch.ones_like(probabilities[:, :1]), probabilities, counts], dim=1)
        rows.append(torch.where(is_valid.unsqueeze(1), seen, 0.0).view(*kept.shape, -1).sum(dim=1))
        # Sigmoid scores are divided by their sum, which has the same relative error.
        worst = torch.where(is_valid.unsqueeze(1), scored.relative, 0.0).amax()
        relative = torch.maximum(relative, 2.0 * worst)
    return z, torch.cat(rows), relative


class Objective(Check[dict[int, LossSums]]):
    """Losses of each step on every rank, for the reference model only: other models divide differently."""

    name = CheckName.OBJECTIVE
    role = Role.ORIGIN

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[dict[int, LossSums]] | None:
        """Return a watch that sums the losses; None for a user's model; see `Check`."""
        if not isinstance(program.subject, ReferenceSubject):
            return None
        moe = run.case.recipe.model.moe
        by_row = moe is not None and moe.balance_scope == "sequence"
        # A pipeline stage has only some of the routers and several micro-batches in flight, and only the
        # last stage shows losses. Hooks do not see routers inside a graph. In both cases only lm is judged.
        is_whole = run.case.layout.pp == 1 and program.run_captured is None
        return ObjectiveWatch(program, by_row=by_row, is_whole=is_whole)

    def judge(self, shown: ShownTensors, reports: Sequence[dict[int, LossSums]]) -> CheckOutcome | None:
        """Return whether each loss follows from the ranks' own values; see `Check`."""
        return judge_losses(shown, reports) if any(reports) else None


def judge_losses(shown: ShownTensors, reports: Sequence[dict[int, LossSums]]) -> CheckOutcome:
    """Return the verdict, with a finding for each loss of a step that some rank reports wrongly."""
    findings: list[Finding] = []
    limits: dict[Key, float] = {}
    worst: Worst | None = None
    for step in sorted(set().union(*reports)):
        of_step = [report.get(step, LossSums()) for report in reports]
        for name, (expected, bound) in _compute_losses(shown, step, of_step).items():
            rows = [(rank, each.losses[name]) for rank, each in enumerate(of_step) if name in each.losses]
            if not rows or expected <= 0.0:
                continue
            errors = {rank: _relative(expected, actual) for rank, actual in rows}
            rank = max(errors, key=errors.__getitem__)
            key = (step, Kind.LOSS, name)
            limits[key] = bound
            if worst is None or errors[rank] / bound > worst.error / worst.bound:
                worst = Worst(tensor=name, error=errors[rank], bound=bound, step=step)
            wrong = tuple(each for each, error in errors.items() if not error <= bound)
            # A total of wrong terms is wrong too and adds no information.
            if wrong and not (name == TOTAL and any(finding.step == step for finding in findings)):
                values = (expected, dict(rows)[rank], bound)
                findings.append(_make_finding(shown, key, (rank, *wrong), values))
    result = CheckResult(
        name=CheckName.OBJECTIVE,
        verdict="mismatch" if findings else "pass",
        tensors=len(limits),
        worst=worst,
    )
    return CheckOutcome(result, tuple(findings), limits)


def _compute_losses(
    shown: ShownTensors, step: int, of_step: Sequence[LossSums]
) -> dict[str, tuple[float, float]]:
    """Return (expected, relative bound) of each loss that the ranks' notes determine."""
    recipe = shown.case.recipe
    model, data = recipe.model, recipe.data
    lengths = find_lengths(recipe, step)
    found: dict[str, tuple[float, float]] = {}
    lm = _compute_lm(of_step, float(lengths.sum()), data.batch * data.seq_len)
    if lm is not None:
        found[LM] = lm
    if model.moe is not None and _copies_agree(of_step, float(lengths.sum())):
        sums = _merge_routers(of_step)
        z = _compute_z(model.moe, sums, float(lengths.sum()))
        balance = _compute_balance(model.moe, sums, lengths)
        found |= {name: each for name, each in ((Z, z), (BALANCE, balance)) if each is not None}
    if len(found) == (1 if model.moe is None else 3):
        total = sum(value for value, _ in found.values())
        # The losses are positive, so their absolute errors add up.
        error = sum(value * bound for value, bound in found.values())
        found[TOTAL] = total, error / total + 4.0 * max(each.eps for each in of_step)
    return found


def _compute_lm(of_step: Sequence[LossSums], num_valid: float, num_tokens: int) -> tuple[float, float] | None:
    """Return the mean of the token losses over valid tokens; None if some are missing or not finite.

    Every rank sums n losses of one sign in blocks, divides, and adds its micro-batches. The rounding errors
    of the blocks add up like a random walk.
    """
    regions = {key: value for each in of_step for key, value in each.token_losses.items()}
    whole = sum(total for total, _ in regions.values())
    if sum(size for _, size in regions.values()) != num_tokens or not math.isfinite(whole):
        return None
    unit = 0.5 * max(each.eps for each in of_step)
    most = max(len(each.token_losses) for each in of_step)
    largest = max(size for _, size in regions.values())
    bound = unit * (4.0 * math.sqrt(largest) + 8.0 + most)
    return whole / num_valid, bound


def _copies_agree(of_step: Sequence[LossSums], num_valid: float) -> bool:
    """Return whether ranks that saw the same tokens computed the same router sums, up to rounding.

    If the replicas of a router have diverged, there is no single loss that the ranks should report.
    """
    groups: dict[frozenset[str], list[LossSums]] = {}
    for each in of_step:
        groups.setdefault(frozenset(each.token_losses), []).append(each)
    names = {name for each in of_step for name in each.routers}
    for name in names:
        num_seen = sum(float(each.routers[name].z[0]) for each in of_step if name in each.routers)
        if num_seen <= num_valid:  # each token was seen by one rank
            continue
        for group in groups.values():
            z = torch.stack(
                [each.routers[name].z for each in group if name in each.routers] or [torch.zeros(3)]
            )
            if float(z[:, 1].max() - z[:, 1].min()) > float(z[:, 2].max()):
                return False
    return True


def _merge_routers(of_step: Sequence[LossSums]) -> dict[str, RouterSums]:
    """Return the sums of each router over all ranks."""
    merged: dict[str, RouterSums] = {}
    for each in of_step:
        for name, own in each.routers.items():
            sums = merged.setdefault(name, RouterSums(torch.zeros(3, dtype=torch.float64)))
            sums.z += own.z
            sums.relative, sums.eps = max(sums.relative, own.relative), max(sums.eps, own.eps)
            for index, row in own.rows.items():
                _add_rows(sums, [index], row.unsqueeze(0))
    return merged


def _compute_z(moe: MoE, routers: dict[str, RouterSums], num_valid: float) -> tuple[float, float] | None:
    """Return the z loss over all layers (ST-MoE, arXiv 2202.08906, eq. 5)."""
    value, error, eps = 0.0, 0.0, 0.0
    for sums in routers.values():
        num_seen, squares, largest = sums.z.tolist()
        times = count_times(num_seen, num_valid)
        if times is None:
            return None
        value, error, eps = value + squares / times, error + largest / times, max(eps, sums.eps)
    if not value or not math.isfinite(value):  # a non-finite loss determines nothing else
        return None
    rounding = 0.5 * eps * (4.0 * math.sqrt(num_valid) + 8.0 + len(routers))
    return moe.z_coef * value / num_valid, error / value + rounding


def _compute_balance(moe: MoE, routers: dict[str, RouterSums], lengths: Tensor) -> tuple[float, float] | None:
    """Return the balance loss over all layers, as `moeverify.train.objective` defines it.

    Shape: lengths (B). All terms have one sign, so the loss has no larger relative error than a
    probability.
    """
    wanted = list_scopes(moe, lengths)
    value, relative, eps = 0.0, 0.0, 0.0
    for sums in routers.values():
        if sums.rows.keys() != wanted.keys():
            return None
        for index, row in sums.rows.items():
            times = count_times(float(row[0]), wanted[index])
            if times is None:
                return None
            probabilities, counts = (row[1:] / (times * wanted[index])).chunk(2)
            value += float((probabilities * counts).sum()) / len(wanted)
        relative, eps = max(relative, sums.relative), max(eps, sums.eps)
    if not value or not math.isfinite(value):
        return None
    num_terms = len(wanted) * moe.num_experts
    rounding = 4.0 * math.sqrt(float(lengths.sum())) + 4.0 * math.sqrt(num_terms) + 8.0 + len(routers)
    return moe.balance_coef * moe.num_experts / moe.top_k * value, relative + 0.5 * eps * rounding


def _relative(expected: float, actual: float) -> float:
    error = abs(actual - expected) / expected
    return error if math.isfinite(error) else math.inf


def _make_finding(
    shown: ShownTensors, key: Key, ranks: tuple[int, ...], values: tuple[float, float, float]
) -> Finding:
    """Return the finding of a loss, without a cause. `ranks` is the worst rank, then all wrong ranks."""
    rank, *wrong = ranks
    expected, actual, bound = values
    terms = () if key[2] == TOTAL else (Part(term=key[2]),)
    return shown.make_finding(
        CheckName.OBJECTIVE,
        key,
        wrong,
        rank=rank,
        error=_relative(expected, actual),
        bound=bound,
        scale=actual / expected if math.isfinite(actual) else None,
        expected=expected,
        actual=actual,
        facts=ObjectiveFacts(),
        place=Place(ranks=tuple(wrong), stage=Stage.LOSS, parts=terms),
    )


CHECKS = (Objective(),)
