"""Whether the gradient of a parameter is the sum of what its layer had on all ranks.

In float8 one number that is rounded otherwise moves all that comes after it, so the gradients of small tensors are
lost in the noise of the golden. Here neither golden nor noise plays a part. Each rank computes again, in float64,
what each of its passes adds to some elements of a gradient: from the inputs of the layer and the gradients of its
outputs, or from the operands of a product in float8. The sum over all ranks must be the gradient that the optimizer
gets, whatever collectives made it: FSDP puts many gradients into one tensor and scatters that, and none can be read
there by itself.

Only rounding may be left: that of each product to the dtype in which the layer computes, and those of the sums.
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

from moeverify.checks.base import Check, Outcome, RankRun, Role, Shown, Watch, rate_error
from moeverify.checks.float8 import name_layers
from moeverify.checks.float8_products import Product, ProductTap
from moeverify.checks.layer_gradients import Added, Kept, Sample, is_known, keep_inputs, list_added
from moeverify.compare.assembled import Key
from moeverify.layout.local_shard import logical_name
from moeverify.layout.placement import local_part
from moeverify.layout.region import Region
from moeverify.layout.unseen import unseen
from moeverify.model.float8_scaling import FLOAT8
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import GradientSumFacts
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.place import Place, Stage
from moeverify.train.program import Program
from moeverify.train.reference_subject import ReferenceSubject

_ROUNDINGS = 4.0  # besides the sums: the divisors before and after them, and the gradient's own dtype
_FITTED = 1e-6  # of the sums of squares: what several ranks added is not alike


@dataclass(frozen=True)
class Summed:
    """What one rank added to the sample of a gradient in a step, and the elements of it that it has in the end.

    Shapes: values, sizes and allowed (elements of the sample), float64; `places` are the numbers of the elements of
    which `held` has the values. `unit` is half the machine epsilon in which ranks add up.
    """

    values: Tensor
    sizes: Tensor
    allowed: Tensor
    count: int
    unit: float
    places: tuple[int, ...] = ()
    held: tuple[float, ...] = ()


Reports = dict[int, dict[str, Summed]]  # by step and parameter


class GradientSumWatch(Watch[Reports]):
    """Computes again what each pass of a layer adds to the gradients of its parameters."""

    def __init__(self, model: nn.Module, float8: str) -> None:
        self._step = -1
        self._handles: list[RemovableHandle] = []
        self._added: dict[tuple[int, str], Added] = {}
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
        """Note the number of the step; see `Watch`."""
        self._step = step

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep the sample of a gradient that layers have added to; see `Watch`."""
        if kind != Kind.GRADIENT or local is None or (step, name) not in self._added:
            return
        places, positions = Sample.of(*region.shape).find_in(region)
        chosen = torch.tensor(positions, dtype=torch.int64, device=local.device)
        values = local.detach().reshape(-1)[chosen].to(torch.float64)
        self._units[step] = max(self._units.get(step, 0.0), 0.5 * torch.finfo(local.dtype).eps)
        self._held[step, name] = tuple(places), values

    def close(self) -> None:
        """Let go of the model; see `Watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._tap is not None:
            self._tap.close()

    def report(self) -> Reports:
        """Return what was added in each step; see `Watch`."""
        found: Reports = {}
        for (step, name), added in self._added.items():
            places, held = self._held.get((step, name), ((), torch.zeros(0)))
            values, sizes, allowed = (
                each.reshape(-1).cpu() for each in (added.values, added.sizes, added.allowed)
            )
            found.setdefault(step, {})[name] = Summed(
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
            output.register_hook(self._make_adder(prefix, module, kept))  # type: ignore[no-untyped-call]

        return hook

    def _make_adder(self, prefix: str, module: nn.Module, kept: Kept) -> Any:
        @torch.no_grad()
        def add(of_outputs: Tensor) -> None:
            for attribute, added in list_added(module, kept, local_part(of_outputs)):
                name = logical_name(f"{prefix}.{attribute}")
                if name not in self._by_product:
                    self._add(name, added)

        return add

    def _hear(self, layer: str, product: Product) -> None:
        if product.what == "grad_weight":
            self._add(f"{layer}.weight", Added(product.expected, product.sizes, product.allowed))

    def _add(self, name: str, added: Added) -> None:
        known = self._added.setdefault((self._step, name), added)
        if known is not added:
            known.add(added)


class GradientSum(Check[Reports]):
    """Gradients of linear layers and norms, against the sums of what all ranks had."""

    name = CheckName.GRADIENT_SUM
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: Program) -> Watch[Reports] | None:
        """Return what computes again; see `Check`."""
        recipe, layout = run.case.recipe, run.case.layout
        # In float64 the golden sees more, and in other precisions its noise leaves most gradients conclusive.
        is_lost = recipe.float8 != "none" and recipe.precision != "float64"
        if not is_lost and self.name not in run.case.checks.also:
            return None
        # Under these axes ranks hold parts of a layer, or share its tokens with others.
        if layout.tp > 1 or layout.pp > 1:
            return None
        if not isinstance(program.subject, ReferenceSubject):
            return None
        return GradientSumWatch(program.model, recipe.float8)

    def judge(self, shown: Shown, reports: Sequence[Reports]) -> Outcome | None:
        """Return whether each gradient is the sum, with a finding for each that is not; see `Check`."""
        return judge_sums(shown, reports) if any(reports) else None


@dataclass(frozen=True)
class _Judged:
    """A gradient beside the sum. Shapes: (held elements of all ranks); `ranks` says whose they are.

    `parts` (elements, R) are what each rank added, divided as the sum is.
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
        """Return whether the gradient is these values, but for so many times the rounding of the right ones."""
        return bool(((self.actual - values).abs() <= times * self.allowed).all())

    @property
    def limit(self) -> float:
        size = float(self.expected.norm())
        return float(self.allowed.norm()) / size if size > 0.0 else math.inf


def judge_sums(shown: Shown, reports: Sequence[Reports]) -> Outcome:
    """Return the verdict, and from which relative error of a gradient on something would have been found."""
    findings: list[Finding] = []
    limits: dict[Key, float] = {}
    worst: tuple[float, Worst] | None = None
    for step in sorted(set().union(*reports)):
        of_step = [report.get(step, {}) for report in reports]
        for name in dict.fromkeys(name for each in of_step for name in each):
            judged = _lay_beside([each.get(name) for each in of_step])
            if judged is None:
                continue
            key = (step, Kind.GRADIENT, name)
            limits[key] = judged.limit
            ratio, at = (float(each) for each in judged.ratio.max(dim=0))
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
        return Outcome(CheckResult(name=CheckName.GRADIENT_SUM, verdict="pass", tensors=0))
    result = CheckResult(
        name=CheckName.GRADIENT_SUM,
        verdict="mismatch" if findings else "pass",
        tensors=len(limits),
        worst=worst[1],
    )
    return Outcome(result, tuple(findings), limits)


def _lay_beside(of_ranks: Sequence[Summed | None]) -> _Judged | None:
    """Return what the ranks have of a gradient beside what they added; None where none has any of it."""
    known = [each for each in of_ranks if each is not None]
    num_ranks = len(of_ranks)
    if not any(each.places for each in known):
        return None
    zero = torch.zeros_like(known[0].values)
    parts = torch.stack([zero if each is None else each.values for each in of_ranks], dim=1) / num_ranks
    sizes = torch.stack([each.sizes for each in known]).sum(dim=0) / num_ranks
    unit, count = max(each.unit for each in known), max(each.count for each in known)
    allowed = torch.stack([each.allowed for each in known]).sum(dim=0) / num_ranks
    allowed = allowed + unit * (count + num_ranks + _ROUNDINGS) * sizes
    held = [(rank, each) for rank, each in enumerate(of_ranks) if each is not None]
    places = torch.tensor([place for _, each in held for place in each.places], dtype=torch.int64)
    return _Judged(
        actual=torch.tensor([value for _, each in held for value in each.held], dtype=torch.float64),
        parts=parts[places],
        allowed=allowed[places],
        ranks=torch.tensor([rank for rank, each in held for _ in each.places]),
    )


def _read(judged: _Judged) -> GradientSumFacts:
    """Return by which coefficients the gradient is made of what the ranks added, where only rounding is left then.

    The simplest ones come first: what rounding leaves of a small part tells its coefficient to few digits.
    """
    num_ranks = judged.parts.shape[1]
    own = judged.parts[torch.arange(len(judged.ranks)), judged.ranks] * num_ranks
    # Where one rank holds all of it, its own part is what is left without the others.
    are_several = len(set(judged.ranks.tolist())) > 1
    if are_several and any(judged.is_made_of(factor * own) for factor in (1.0, 1.0 / num_ranks)):
        return GradientSumFacts(is_own=True)
    if not bool(judged.parts.isfinite().all() and judged.actual.isfinite().all()):
        return GradientSumFacts()
    for found in _list_coefficients(judged):
        if judged.is_made_of(judged.parts @ found, float(found.abs().max().clamp(min=1.0))):
            return GradientSumFacts(factors=dict(enumerate(found.tolist())))
    return GradientSumFacts()


def _list_coefficients(judged: _Judged) -> Iterator[Tensor]:
    """Yield how often the parts of the ranks (R) may be there: all but one, all alike, or each as it fits best."""
    num_ranks = judged.parts.shape[1]
    for rank in range(num_ranks):
        yield (torch.arange(num_ranks) != rank).to(torch.float64)
    squares = float(judged.expected.square().sum())
    if squares > 0.0:
        yield torch.full((num_ranks,), float(judged.actual @ judged.expected) / squares, dtype=torch.float64)
    gram = judged.parts.T @ judged.parts
    if float(torch.linalg.eigvalsh(gram)[0]) > _FITTED * float(gram.diagonal().max()):
        yield torch.linalg.solve(gram, judged.parts.T @ judged.actual)


def _make_finding(shown: Shown, key: Key, judged: _Judged, at: int, scale: float) -> Finding:
    step, kind, name = key
    rank = int(judged.ranks[at])
    ranks = tuple(sorted({int(each) for each in judged.ranks[judged.ratio > 1.0]}))
    facts = _read(judged)
    code = Cause.MISSING_REDUCTION if facts.is_own else Cause.BACKWARD
    if facts.factors:
        code = Cause.SCALE if facts.factor is not None else Cause.SHARE_WEIGHTS
    return Finding(
        check=CheckName.GRADIENT_SUM,
        kind=kind,
        tensor=name,
        step=step,
        rank=rank,
        ranks=ranks,
        coordinates=shown.place(rank),
        error=rate_error(float((judged.actual - judged.expected)[at].abs()) / scale),
        bound=float(judged.allowed[at]) / scale,
        scale=facts.factor,
        expected=float(judged.expected[at]),
        actual=float(judged.actual[at]),
        code=code,
        facts=facts,
        place=Place(module=name.rpartition(".")[0], ranks=ranks, stage=Stage.BACKWARD),
    )


CHECKS = (GradientSum(),)
