"""Check the gradients of the balance and z losses at each router, and of the router's weight.

Both losses are linear in values that the router returns: a sum of probabilities for each row, and a sum of
squares. Their gradients there are a number from the recipe times the counts of the choices. This holds at
any precision, however small the loss is compared with the rounding of the cross entropy.
`moeverify.verification.checks.router_backward` recomputes the path from there to the router's weight.

A rank knows only its own counts. They are summed over all ranks when the gradients are judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.cases.schema import MoE
from moeverify.model.precision import widen
from moeverify.model.router import Router, Routing
from moeverify.parallel.regions.placement import local_part
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import RouterGradientFacts, Term
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.part import Part
from moeverify.results.place import Place, Stage
from moeverify.train.module_taps import hook_gradient
from moeverify.train.program import TrainingProgram
from moeverify.train.reference_subject import ReferenceSubject
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    rate_error,
)
from moeverify.verification.checks.router_backward import PARTS, RouterFit, RouterInputs, measure_backward
from moeverify.verification.checks.router_passes import (
    MicroBatchPasses,
    count_times,
    find_lengths,
    list_scopes,
)

_MOST_DEVIATIONS = 10.0  # allowed error of a coefficient, in standard errors
_STEADY = 3.0 / _MOST_DEVIATIONS  # share of these within which two coefficients count as equal
_KNOWN = 0.02  # relative error up to which a factor counts as known
_TERMS = tuple(
    sorted((term for term, _ in PARTS), key=lambda term: term == "combine")
)  # losses first, combine last
_ROUNDINGS = 16.0  # a few products and quotients, in float32 or wider


@dataclass
class RouterStep:
    """Counts and gradients of one router on a rank in a step.

    `counts` (2, E) are, for each row of the global batch, the choices of valid tokens and of all tokens.
    All rows are under key 0 if the balance loss covers the whole batch. `balance` (E) is the gradient of
    each row's sum of probabilities. `z` are the gradients of the sums of z. `fits` are fits of the weight's
    gradient, one per step. `unit` is half the machine epsilon of the router's compute dtype.
    """

    counts: dict[int, Tensor] = field(default_factory=dict)
    balance: dict[int, Tensor] = field(default_factory=dict)
    z: list[float] = field(default_factory=list)
    fits: list[RouterFit] = field(default_factory=list)
    unit: float = 0.0


Reports = dict[int, dict[str, RouterStep]]  # by step and router


@dataclass
class _GradientPass:
    """One forward pass. Its gradients arrive later; a recomputation of activations never receives any."""

    name: str
    counts: Tensor  # (B, 2, E)
    unit: float
    balance: Tensor | None = None  # (B, E)
    z: Tensor | None = None
    weights: Tensor | None = None  # (B, S, k), until the backward pass is measured
    backward: Tensor | None = None


@dataclass
class _Awaited:
    """Pending gradient of one router's weight, in the first micro-batch of a step.

    `is_known` means that its forward pass was seen. A second pass is a recomputation, or another
    micro-batch.
    """

    handle: RemovableHandle | None = None
    measure: Callable[[Tensor], None] | None = None
    is_known: bool = False

    @torch.no_grad()
    def hear(self, gradient: Tensor) -> None:
        """Measure the gradient. Later ones in the step belong to other micro-batches."""
        if self.measure is not None:
            self.measure(local_part(gradient))
            self.measure = None


class RouterGradientWatch(MicroBatchPasses[Reports, _GradientPass]):
    """Records gradients at each router, and recomputes its backward pass in one micro-batch per step.

    `scale` is the factor by which the layout multiplies the losses before the backward pass, because it
    averages gradients.
    """

    def __init__(self, model: nn.Module, *, by_row: bool, scale: float) -> None:
        super().__init__(model)
        self._by_row = by_row
        self._scale = scale
        self._awaited: dict[nn.Module, _Awaited] = {}

    def begin_step(self, step: int) -> None:
        """Drop pending gradients of the previous step; see `Watch`."""
        self._forget()
        super().begin_step(step)

    def close(self) -> None:
        """Remove the hooks; see `Watch`."""
        self._forget()
        super().close()

    def see(
        self, name: str, router: Router, weight: Tensor, x: Tensor, valid: Tensor | None, routing: Routing
    ) -> None:
        """Record one pass with a backward pass; see `RouterPasses`."""
        if not routing.weights.requires_grad:
            return
        if valid is None:
            valid = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        selected = torch.zeros(*x.shape[:-1], len(weight), dtype=torch.int64, device=x.device)
        selected = selected.scatter(-1, routing.ids, 1)
        counts = torch.stack([(selected * valid.unsqueeze(-1)).sum(dim=1), selected.sum(dim=1)], dim=1)
        seen = _GradientPass(name, counts, 0.5 * torch.finfo(widen(x.dtype)).eps)
        self.keep(seen)
        returning = [(routing.stats.probability_sum, "balance"), (routing.stats.z_sum, "z")]
        awaited = self._awaited.get(router)
        if awaited is not None and not awaited.is_known:
            returning.append((routing.weights, "weights"))
            bias = None if router.bias is None else local_part(router.view(router.bias)).to(torch.float64)
            awaited.measure = _make_measure(seen, router.spec, weight, bias, x, valid, routing.ids)
            awaited.is_known = True
        for value, field_name in returning:
            if value.requires_grad:
                hook_gradient(value, _make_keeper(seen, field_name))

    def report(self) -> Reports:
        """Return the gradients of each step; see `Watch`."""
        found: Reports = {}
        for step, passes in self.passes.items():
            for seen, rows in passes:
                self._add(found.setdefault(step, {}).setdefault(seen.name, RouterStep()), seen, rows)
        return found

    @torch.no_grad()
    def _keep_weight(self, module: nn.Module, inputs: Any) -> None:
        super()._keep_weight(module, inputs)
        if torch.compiler.is_compiling() or module in self._awaited or self.step < 0:
            return
        weight = module.weight
        if isinstance(weight, Tensor) and weight.requires_grad:
            awaited = _Awaited()
            awaited.handle = hook_gradient(weight, awaited.hear)
            self._awaited[module] = awaited

    def _forget(self) -> None:
        for awaited in self._awaited.values():
            if awaited.handle is not None:
                awaited.handle.remove()
            awaited.measure = None
        self._awaited = {}

    def _add(self, found: RouterStep, seen: _GradientPass, rows: Sequence[int] | None) -> None:
        if rows is None or len(rows) != len(seen.counts):
            return
        found.unit = seen.unit
        for place, row in enumerate(rows):
            key = row if self._by_row else 0
            counts = seen.counts[place].cpu()
            found.counts[key] = found.counts[key] + counts if key in found.counts else counts
            if seen.balance is not None:
                found.balance[row] = seen.balance[place].to("cpu", torch.float64) / self._scale
        if seen.z is not None:
            found.z.append(float(seen.z) / self._scale)
        if seen.backward is not None:
            found.fits.append(RouterFit.of(seen.backward.cpu()))


def _make_keeper(seen: _GradientPass, name: str) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        setattr(seen, name, gradient.detach().clone())

    return hook


def _make_measure(
    seen: _GradientPass, spec: MoE, weight: Tensor, bias: Tensor | None, x: Tensor, valid: Tensor, ids: Tensor
) -> Callable[[Tensor], None]:
    """Return a callback that takes the gradient (E, H) of the weight.

    Shapes: x (B, S, H), valid (B, S), ids (B, S, k).
    """

    def measure(actual: Tensor) -> None:
        if actual.shape != weight.shape:
            return  # each rank has only a shard, or it was reduced already
        of_weights = torch.zeros_like(ids, dtype=torch.float64) if seen.weights is None else seen.weights
        rows = (
            torch.zeros_like(seen.counts[:, 0], dtype=torch.float64) if seen.balance is None else seen.balance
        )
        of_probabilities = rows.unsqueeze(1).expand(*x.shape[:-1], len(weight)).flatten(0, -2)
        of_z = torch.zeros((), dtype=torch.float64, device=x.device) if seen.z is None else seen.z
        flat = (x.flatten(0, -2), valid.flatten(), ids.flatten(0, -2), of_weights.flatten(0, -2))
        seen.backward = measure_backward(
            RouterInputs(spec, weight, bias, *flat, of_probabilities, of_z), actual
        )
        seen.weights = None

    return measure


class RouterGradient(Check[Reports]):
    """Gradients at the routers of the reference model, on every rank."""

    name = CheckName.ROUTER_GRADIENT
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[Reports] | None:
        """Return a watch that records gradients; None where the check does not apply; see `Check`."""
        moe = run.case.recipe.model.moe
        # A pipeline stage has several micro-batches in flight and does not show their rows.
        if not isinstance(program.subject, ReferenceSubject) or moe is None or run.case.layout.pp > 1:
            return None
        # A layout may define router losses of its own.
        if program.own_router_losses is not None:
            return None
        return RouterGradientWatch(program.model, by_row=moe.balance_scope == "sequence", scale=program.scale)

    def judge(self, shown: ShownTensors, reports: Sequence[Reports]) -> CheckOutcome | None:
        """Return whether all gradients at the routers are right; see `Check`."""
        return judge_gradients(shown, reports) if any(reports) else None


@dataclass(frozen=True)
class _Measured:
    """Error, bound and factor of a term's gradient at one router of a rank."""

    rank: int
    router: str
    error: float
    bound: float
    factor: float | None
    in_router: bool = False

    @property
    def ratio(self) -> float:
        """Return the error over its bound. Bound and error may both be 0 on a rank with only padding."""
        return self.error / self.bound if self.bound > 0.0 else math.inf if self.error > 0.0 else 0.0


def judge_gradients(shown: ShownTensors, reports: Sequence[Reports]) -> CheckOutcome:
    """Return the verdict, with a finding for each term of a step that is wrong on some rank."""
    moe = shown.case.recipe.model.moe
    assert moe is not None
    findings: list[Finding] = []
    worst: Worst | None = None
    most = 0.0
    num_judged = 0
    for step in sorted(set().union(*reports)):
        of_step = [report.get(step, {}) for report in reports]
        measured = [*_measure_losses(shown, moe, step, of_step), *_measure_backward(of_step)]
        num_judged += len(measured)
        for term in _TERMS:
            rows = [each for name, each in measured if name == term]
            if not rows:
                continue
            largest = max(rows, key=lambda each: each.ratio)
            if worst is None or largest.ratio > most:
                name, most = f"{largest.router} {term}", largest.ratio
                worst = Worst(tensor=name, error=largest.error, bound=largest.bound, step=step)
            wrong = [each for each in rows if not each.error <= each.bound]
            if wrong:
                findings.append(_make_finding(shown, step, term, wrong))
    result = CheckResult(
        name=CheckName.ROUTER_GRADIENT,
        verdict="mismatch" if findings else "pass",
        tensors=num_judged,
        worst=worst,
    )
    return CheckOutcome(result, tuple(findings))


def _measure_losses(
    shown: ShownTensors, moe: MoE, step: int, of_step: Sequence[Mapping[str, RouterStep]]
) -> Iterator[tuple[Term, _Measured]]:
    """Yield the measured gradients of the losses at each router."""
    lengths = find_lengths(shown.case.recipe, step)
    num_valid, wanted = float(lengths.sum()), list_scopes(moe, lengths)
    merged = {name: _merge_counts(of_step, name) for name in sorted({n for each in of_step for n in each})}
    shares = {name: _shares(counts, wanted, moe.top_k) for name, counts in merged.items()}
    for rank, each in enumerate(of_step):
        for name, seen in each.items():
            bound = _ROUNDINGS * seen.unit
            if moe.z_coef and seen.counts:
                for value in seen.z or [0.0]:
                    # The gradient of the sum of z is z_coef / num_valid on every rank.
                    factor = value * num_valid / moe.z_coef
                    yield "z", _Measured(rank, name, abs(factor - 1.0), bound, factor)
            share = shares[name]
            if not moe.balance_coef or share is None or not seen.counts:
                continue
            weight = moe.balance_coef * moe.num_experts / moe.top_k
            for row, actual in (
                seen.balance or {row: torch.zeros(moe.num_experts) for row in seen.counts}
            ).items():
                key = row if moe.balance_scope == "sequence" else 0
                # The derivative of the balance loss by a token's probabilities; see `moeverify.train.objective`.
                divisor = wanted[key] * len(wanted)
                expected = weight * share[key] / divisor
                error = float((actual - expected).norm() / expected.norm())
                yield (
                    "balance",
                    _Measured(rank, name, rate_error(error), bound, _find_factor(actual, expected)),
                )


def _merge_counts(of_step: Sequence[Mapping[str, RouterStep]], name: str) -> dict[int, Tensor]:
    merged: dict[int, Tensor] = {}
    for each in of_step:
        for row, counts in (each[name].counts if name in each else {}).items():
            merged[row] = merged[row] + counts if row in merged else counts
    return merged


def _shares(
    counts: Mapping[int, Tensor], wanted: Mapping[int, float], top_k: int
) -> dict[int, Tensor] | None:
    """Return the share of valid tokens that chose each expert, (E) for each row, over all ranks.

    Return None if the ranks did not see every valid token equally often.
    """
    if counts.keys() != wanted.keys():
        return None
    found: dict[int, Tensor] = {}
    for row, length in wanted.items():
        valid = counts[row][0].to(torch.float64)
        times = count_times(float(valid.sum()) / top_k, length)
        if times is None:
            return None
        found[row] = valid / (times * length)
    return found


def _find_factor(actual: Tensor, expected: Tensor) -> float | None:
    """Return the multiple of the expected gradient (E) that the actual one is, or None."""
    actual = actual.to(torch.float64)
    factor = float(actual @ expected / (expected @ expected))
    # A multiple leaves the rounding of float32, which is far below 1e-5.
    left = float((actual - factor * expected).norm())
    return factor if left <= 1e-5 * float(actual.norm()) else None


def _measure_backward(of_step: Sequence[Mapping[str, RouterStep]]) -> Iterator[tuple[Term, _Measured]]:
    """Yield the measured coefficients of each router's weight gradient."""
    for rank, each in enumerate(of_step):
        for name, seen in each.items():
            for fit in seen.fits:
                is_off = False
                for (term, times), found in zip(PARTS, fit.coefficients, strict=True):
                    # If other parts are left, the remainder may resemble any of these.
                    if found is not None and (fit.is_whole or not fit.ratio > 1.0):
                        value, deviation = found
                        error, bound = abs(value - times), _MOST_DEVIATIONS * deviation
                        is_off = is_off or error > bound
                        yield term, _Measured(rank, name, error, bound, value, in_router=True)
                if not (is_off and fit.is_whole):
                    yield "combine", _Measured(rank, name, rate_error(fit.ratio), 1.0, None, in_router=True)


def _is_steady(wrong: Sequence[_Measured]) -> bool:
    """Return whether each rank has one factor in all of its routers, within the errors."""
    first: dict[int, _Measured] = {}
    for each in wrong:
        other = first.setdefault(each.rank, each)
        if each.factor is None or other.factor is None:
            return False
        # A fitted coefficient is wrong beyond ten deviations. Two coefficients count as equal only within
        # three.
        share = _STEADY if each.in_router else 1.0
        if not abs(each.factor - other.factor) <= share * (each.bound + other.bound):
            return False
    return True


def _find_code(term: Term, worst: _Measured, wrong: Sequence[_Measured]) -> Cause:
    if term.endswith("padding"):
        return Cause.PADDING
    if not _is_steady(wrong):
        return Cause.FORWARD
    others = [each for each in wrong if each.router == worst.router]
    is_known = not worst.in_router or all(_is_known(each) for each in wrong)
    if is_known and _is_steady([replace(each, rank=0) for each in others]):
        return Cause.TERM_SCALE
    # Each rank has its own factor, which only other routers can confirm.
    is_confirmed = len(others) < len(wrong) and is_known
    return Cause.SHARE_WEIGHTS if is_confirmed or not worst.in_router else Cause.FORWARD


def _is_known(each: _Measured) -> bool:
    """Return whether a fitted factor is known to a few percent. The projection of another function varies."""
    factor = abs(each.factor or 0.0)
    return _STEADY * each.bound <= _KNOWN * factor or factor <= each.bound


def _make_finding(shown: ShownTensors, step: int, term: Term, wrong: Sequence[_Measured]) -> Finding:
    # If the gradient at a router's outputs is wrong, its effect on the weight adds no information.
    wrong = [each for each in wrong if not each.in_router] or wrong
    ranks = tuple(sorted({each.rank for each in wrong}))
    worst = max(wrong, key=lambda each: each.ratio)
    # The first of a rank, if it has several.
    factors = {each.rank: each.factor for each in reversed(wrong) if each.router == worst.router}
    code = _find_code(term, worst, wrong)
    if code == Cause.FORWARD and worst.in_router:
        # The projection of another function on the right one, not a factor that the code applied.
        factors = dict.fromkeys(factors)
    return shown.make_finding(
        CheckName.ROUTER_GRADIENT,
        (step, Kind.GRADIENT, f"{worst.router}.weight"),
        ranks,
        rank=worst.rank,
        error=worst.error,
        bound=worst.bound,
        scale=worst.factor,
        code=code,
        facts=RouterGradientFacts(
            term=term,
            factors=dict(sorted(factors.items())),
            in_router=worst.in_router,
            num_routers=len({each.router for each in wrong}),
        ),
        place=Place(
            module=worst.router,
            ranks=ranks,
            stage=Stage.BACKWARD,
            parts=() if term == "combine" else (Part(term=term.partition(" ")[0]),),
        ),
    )


CHECKS = (RouterGradient(),)
