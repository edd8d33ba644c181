"""Check that the gradient of a parameter is the sum of its layer's contributions on all ranks.

In float8, one differently rounded number changes everything after it, so the golden's noise hides errors in
the gradients of small tensors. This check uses neither golden nor noise. Each rank recomputes, in float64,
the contribution of each of its passes to some elements of a gradient. The inputs are the layer's inputs and
output gradients, or the operands of a float8 product. The sum over all ranks must be the gradient that the
optimizer gets, whichever collectives produced it. FSDP packs many gradients into one tensor before the
reduce-scatter, so single gradients cannot be read there.

The remaining difference is rounding: of each product to the layer's compute dtype, and of the sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.model.float8_scaling import FLOAT8
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.unseen import unseen
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import GradientSumFacts
from moeverify.results.finding import CheckResult, Finding, Worst
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
from moeverify.verification.checks.float8 import name_layers
from moeverify.verification.checks.float8_products import ProductTap, SampledProduct
from moeverify.verification.checks.layer_gradients import (
    LayerContribution,
    LayerInputs,
    Sample,
    is_known,
    keep_inputs,
    list_contributions,
)
from moeverify.verification.compare.assembled import Key

_ROUNDINGS = 4.0  # of the divisors before and after the sums, and of the gradient's own dtype
_FITTED = 1e-6  # least eigenvalue of the Gram matrix, relative to its diagonal, of independent parts


@dataclass(frozen=True)
class RankContributions:
    """Contributions of one rank to a gradient's sample in one step, and its elements after the reduction.

    Shapes: values, sizes and allowed (elements of the sample), float64. `places` are the indices in the
    sample of the values in `held`. `unit` is half the machine epsilon of the reduction dtype.
    """

    values: Tensor
    sizes: Tensor
    allowed: Tensor
    count: int
    unit: float
    places: tuple[int, ...] = ()
    held: tuple[float, ...] = ()


Reports = dict[int, dict[str, RankContributions]]  # by step and parameter


class GradientSumWatch(Watch[Reports]):
    """Recomputes the contribution of each pass of a layer to the gradients of its parameters."""

    def __init__(self, model: nn.Module, float8: str) -> None:
        self._step = -1
        self._handles: list[RemovableHandle] = []
        self._added: dict[tuple[int, str], LayerContribution] = {}
        self._held: dict[tuple[int, str], tuple[tuple[int, ...], Tensor]] = {}
        self._units: dict[int, float] = {}
        self._tap: ProductTap | None = None
        products: Mapping[int, str] = {}
        if float8 != "none" and not FLOAT8.find(float8).wide_weight_gradient:
            _, products = name_layers(model)
            self._tap = ProductTap(products, self._hear)
        self._by_product = frozenset(f"{layer}.weight" for layer in products.values())
        uses = Counter(id(each) for part in model.modules() for each in part.parameters(recurse=False))
        for prefix, module in model.named_modules():
            is_shared = any(uses[id(each)] > 1 for each in module.parameters(recurse=False))
            if is_known(module) and not is_shared:
                self._handles.append(module.register_forward_hook(unseen(self._make_hook(prefix))))

    def begin_step(self, step: int) -> None:
        """Record the number of the step; see `Watch`."""
        self._step = step

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep the sample of a gradient that layers have contributed to; see `Watch`."""
        if kind != Kind.GRADIENT or local is None or (step, name) not in self._added:
            return
        places, positions = Sample.of(*region.shape).find_in(region)
        chosen = torch.tensor(positions, dtype=torch.int64, device=local.device)
        values = local.detach().reshape(-1)[chosen].to(torch.float64)
        self._units[step] = max(self._units.get(step, 0.0), 0.5 * torch.finfo(local.dtype).eps)
        self._held[step, name] = tuple(places), values

    def close(self) -> None:
        """Release the model; see `Watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._tap is not None:
            self._tap.close()

    def report(self) -> Reports:
        """Return the contributions of each step; see `Watch`."""
        found: Reports = {}
        for (step, name), added in self._added.items():
            places, held = self._held.get((step, name), ((), torch.zeros(0)))
            values, sizes, allowed = (
                each.reshape(-1).cpu() for each in (added.values, added.sizes, added.allowed)
            )
            found.setdefault(step, {})[name] = RankContributions(
                values,
                sizes,
                allowed,
                added.count,
                self._units.get(step, 0.0),
                places,
                tuple(held.tolist()),
            )
        return found

    def _make_hook(self, prefix: str) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if torch.compiler.is_compiling() or self._step < 0 or not output.requires_grad:
                return
            kept = keep_inputs(module, local_part(inputs[0]))
            hook_gradient(output, self._make_adder(prefix, module, kept))

        return hook

    def _make_adder(self, prefix: str, module: nn.Module, kept: LayerInputs) -> Any:
        @torch.no_grad()
        def add(of_outputs: Tensor) -> None:
            for attribute, added in list_contributions(module, kept, local_part(of_outputs)):
                name = logical_name(f"{prefix}.{attribute}")
                if name not in self._by_product:
                    self._add(name, added)

        return add

    def _hear(self, layer: str, product: SampledProduct) -> None:
        if product.role == "grad_weight":
            self._add(f"{layer}.weight", LayerContribution(product.expected, product.sizes, product.allowed))

    def _add(self, name: str, added: LayerContribution) -> None:
        known = self._added.setdefault((self._step, name), added)
        if known is not added:
            known.add(added)


class GradientSum(Check[Reports]):
    """Gradients of linear layers and norms, against the sums of all ranks' contributions."""

    name = CheckName.GRADIENT_SUM
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[Reports] | None:
        """Return a watch that recomputes contributions; None where the check does not apply; see `Check`."""
        recipe, layout = run.case.recipe, run.case.layout
        # In float64 the golden has tighter bounds. In other precisions its noise leaves most gradients
        # conclusive.
        is_lost = recipe.float8 != "none" and recipe.precision != "float64"
        if not is_lost and self.name not in run.case.checks.also:
            return None
        # Under these axes ranks hold parts of a layer, or share its tokens with other ranks.
        if layout.tp > 1 or layout.pp > 1:
            return None
        if not isinstance(program.subject, ReferenceSubject):
            return None
        return GradientSumWatch(program.model, recipe.float8)

    def judge(self, shown: ShownTensors, reports: Sequence[Reports]) -> CheckOutcome | None:
        """Return the verdict, with a finding for each gradient that is not the sum; see `Check`."""
        return judge_sums(shown, reports) if any(reports) else None


@dataclass(frozen=True)
class _JudgedSum:
    """A gradient and its recomputed sum. Shapes: (held elements of all ranks); `ranks` are their holders.

    `parts` (elements, R) are the contributions of each rank, divided like the sum.
    """

    actual: Tensor
    parts: Tensor
    allowed: Tensor
    ranks: Tensor

    @property
    def expected(self) -> Tensor:
        return self.parts.sum(dim=1)

    @property
    def ratio(self) -> Tensor:
        return ((self.actual - self.expected).abs() / self.allowed).nan_to_num(math.inf)

    def is_made_of(self, values: Tensor, times: float = 1.0) -> bool:
        """Return whether the gradient equals these values, within `times` the allowed rounding."""
        return bool(((self.actual - values).abs() <= times * self.allowed).all())

    @property
    def limit(self) -> float:
        size = float(self.expected.norm())
        return float(self.allowed.norm()) / size if size > 0.0 else math.inf


def judge_sums(shown: ShownTensors, reports: Sequence[Reports]) -> CheckOutcome:
    """Return the verdict, and for each gradient the relative error from which on it would be found."""
    findings: list[Finding] = []
    limits: dict[Key, float] = {}
    worst: tuple[float, Worst] | None = None
    for step in sorted(set().union(*reports)):
        of_step = [report.get(step, {}) for report in reports]
        for name in dict.fromkeys(name for each in of_step for name in each):
            judged = _join_ranks([each.get(name) for each in of_step])
            if judged is None:
                continue
            key = (step, Kind.GRADIENT, name)
            limits[key] = judged.limit
            ratio, at = (float(each) for each in judged.ratio.max(dim=0))
            # Errors and bounds are relative to the root mean square of the elements.
            scale = float(judged.expected.square().mean().sqrt()) or 1.0
            error, bound = (
                float(each[int(at)]) / scale
                for each in ((judged.actual - judged.expected).abs(), judged.allowed)
            )
            if worst is None or ratio > worst[0]:
                worst = ratio, Worst(tensor=name, error=rate_error(error), bound=bound, step=step)
            if ratio > 1.0:
                findings.append(_make_finding(shown, key, judged, int(at), scale))
    if worst is None:
        return CheckOutcome(CheckResult(name=CheckName.GRADIENT_SUM, verdict="pass", tensors=0))
    result = CheckResult(
        name=CheckName.GRADIENT_SUM,
        verdict="mismatch" if findings else "pass",
        tensors=len(limits),
        worst=worst[1],
    )
    return CheckOutcome(result, tuple(findings), limits)


def _join_ranks(of_ranks: Sequence[RankContributions | None]) -> _JudgedSum | None:
    """Return the held elements of a gradient and the contributions to them; None if no rank holds any."""
    known = [each for each in of_ranks if each is not None]
    num_ranks = len(of_ranks)
    if not any(each.places for each in known):
        return None
    zero = torch.zeros_like(known[0].values)
    # Gradients are means over all ranks, so a contribution counts 1 / num_ranks.
    parts = torch.stack([zero if each is None else each.values for each in of_ranks], dim=1) / num_ranks
    sizes = torch.stack([each.sizes for each in known]).sum(dim=0) / num_ranks
    unit, count = max(each.unit for each in known), max(each.count for each in known)
    allowed = torch.stack([each.allowed for each in known]).sum(dim=0) / num_ranks
    # One rounding for each pass and each rank that is added, and some for divisors.
    allowed = allowed + unit * (count + num_ranks + _ROUNDINGS) * sizes
    held = [(rank, each) for rank, each in enumerate(of_ranks) if each is not None]
    places = torch.tensor([place for _, each in held for place in each.places], dtype=torch.int64)
    return _JudgedSum(
        actual=torch.tensor([value for _, each in held for value in each.held], dtype=torch.float64),
        parts=parts[places],
        allowed=allowed[places],
        ranks=torch.tensor([rank for rank, each in held for _ in each.places]),
    )


def _read(judged: _JudgedSum) -> GradientSumFacts:
    """Return the coefficients with which the ranks' contributions make up the gradient, up to rounding.

    Simple coefficients are tried first: with rounding, a small part determines its coefficient only to a
    few digits.
    """
    num_ranks = judged.parts.shape[1]
    own = judged.parts[torch.arange(len(judged.ranks)), judged.ranks] * num_ranks
    # If one rank holds all elements, its own part equals the case in which all other parts are missing.
    are_several = len(set(judged.ranks.tolist())) > 1
    if are_several and any(judged.is_made_of(factor * own) for factor in (1.0, 1.0 / num_ranks)):
        return GradientSumFacts(is_own=True)
    if not bool(judged.parts.isfinite().all() and judged.actual.isfinite().all()):
        return GradientSumFacts()
    for found in _list_coefficients(judged):
        if judged.is_made_of(judged.parts @ found, float(found.abs().max().clamp(min=1.0))):
            return GradientSumFacts(factors=dict(enumerate(found.tolist())))
    return GradientSumFacts()


def _list_coefficients(judged: _JudgedSum) -> Iterator[Tensor]:
    """Yield candidate coefficients (R): all ranks but one, one common factor, or the least-squares fit."""
    num_ranks = judged.parts.shape[1]
    for rank in range(num_ranks):
        yield (torch.arange(num_ranks) != rank).to(torch.float64)
    squares = float(judged.expected.square().sum())
    if squares > 0.0:
        yield torch.full((num_ranks,), float(judged.actual @ judged.expected) / squares, dtype=torch.float64)
    # Contributions that depend on each other have no unique coefficients.
    gram = judged.parts.T @ judged.parts
    if float(torch.linalg.eigvalsh(gram)[0]) > _FITTED * float(gram.diagonal().max()):
        yield torch.linalg.solve(gram, judged.parts.T @ judged.actual)


def _make_finding(shown: ShownTensors, key: Key, judged: _JudgedSum, at: int, scale: float) -> Finding:
    ranks = tuple(sorted({int(each) for each in judged.ranks[judged.ratio > 1.0]}))
    facts = _read(judged)
    code = Cause.MISSING_REDUCTION if facts.is_own else Cause.BACKWARD
    if facts.factors:
        code = Cause.SCALE if facts.factor is not None else Cause.SHARE_WEIGHTS
    return shown.make_finding(
        CheckName.GRADIENT_SUM,
        key,
        ranks,
        rank=int(judged.ranks[at]),
        error=rate_error(float((judged.actual - judged.expected)[at].abs()) / scale),
        bound=float(judged.allowed[at]) / scale,
        scale=facts.factor,
        expected=float(judged.expected[at]),
        actual=float(judged.actual[at]),
        code=code,
        facts=facts,
        place=Place(module=key[2].rpartition(".")[0], ranks=ranks, stage=Stage.BACKWARD),
    )


CHECKS = (GradientSum(),)
