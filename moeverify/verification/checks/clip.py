"""Check that the gradient norm matches the ranks' gradients, and the clip coefficient matches the norm.

Every rank sums the squares of its local gradients in float64. Rank 0 counts each region of each logical
tensor once, so the groups and the reduction order of the layout do not matter. If the replicas of a region
differ, any of them may be counted: one rank's replica on all ranks, or each rank's own. Another check
reports the differing replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeverify.parallel.regions.observer import Named
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import ClipFacts
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.place import Place, Stage
from moeverify.train.clipping import GUARD
from moeverify.train.engine import PlainEngine
from moeverify.train.program import TrainingProgram
from moeverify.verification.checks.base import Check, CheckOutcome, RankRun, Role, ShownTensors, Watch
from moeverify.verification.compare.assembled import Key

TOTAL = "total"
COEFFICIENT = "clip_coefficient"
_ORDERS = (2.0, 1.0, math.inf)
_CHUNK = 1 << 20  # elements converted to float64 at once on a CPU, to fit its cache


@dataclass
class StepGradients:
    """Gradients of one rank in one step.

    - `squares`: the sum of squares of each shard, by (tensor, region).
    - `sizes`: for each shard, the sum and the maximum of the absolute values, and the number of elements.
    - `norms`: the gradient norm and the clip coefficient, by name.
    - `eps`: the machine epsilon of each norm, and of the gradients if norms may be rounded to their dtype.
    - `num_elements`: the number of elements of the largest shard.
    """

    squares: dict[tuple[str, str], float] = field(default_factory=dict)
    sizes: dict[tuple[str, str], tuple[float, float, int]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    eps: dict[str, float] = field(default_factory=dict)
    num_elements: int = 0


class GradientWatch(Watch[dict[int, StepGradients]]):
    """Sums the squares of gradients as they are shown. It reads nothing from a GPU before the run is over.

    `norms_are_wide` means that norms are computed in their own dtype, not per tensor in the dtype of the
    gradients.
    """

    def __init__(self, *, norms_are_wide: bool) -> None:
        self._norms_are_wide = norms_are_wide
        self._squares: dict[int, dict[tuple[str, str], Tensor]] = {}
        self._numels: dict[int, dict[tuple[str, str], int]] = {}
        self._norms: dict[int, dict[str, Tensor]] = {}
        self._eps: dict[int, dict[str, float]] = {}
        self._sizes: dict[int, int] = {}

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Record a gradient, a norm or a coefficient; see `Watch`."""
        self.observe_all(step, kind, [(name, local, region)])

    def observe_all(self, step: int, kind: str, shown: Sequence[Named]) -> None:
        """Record gradients, norms or coefficients; see `moeverify.parallel.regions.observer.BulkObserver`."""
        found = [
            (name, local, region)
            for name, local, region in shown
            if local is not None and local.is_floating_point()
        ]
        if kind == Kind.GRADIENT:
            found = [each for each in found if each[2].numel]
            measured = _measure_gradients([local for _, local, _ in found])
            for (name, local, region), row in zip(found, measured, strict=True):
                self._squares.setdefault(step, {})[name, region.key] = row
                self._numels.setdefault(step, {})[name, region.key] = region.numel
                if not self._norms_are_wide:
                    self._note_eps(step, Kind.GRADIENT, local)
                self._sizes[step] = max(self._sizes.get(step, 0), region.numel)
        elif kind == Kind.GRADIENT_NORM:
            for name, local, _ in found:
                self._norms.setdefault(step, {})[name] = local.detach().clone()
                self._note_eps(step, name, local)

    def report(self) -> dict[int, StepGradients]:
        """Return the numbers of every step; see `Watch`."""
        measured = {step: torch.stack(list(each.values())).tolist() for step, each in self._squares.items()}
        return {
            step: StepGradients(
                {key: square for key, (square, _, _) in zip(squares, measured[step], strict=True)},
                {
                    key: (absolute, largest, self._numels[step][key])
                    for key, (_, absolute, largest) in zip(squares, measured[step], strict=True)
                },
                {name: float(value) for name, value in self._norms.get(step, {}).items()},
                self._eps.get(step, {}),
                self._sizes.get(step, 0),
            )
            for step, squares in self._squares.items()
        }

    def _note_eps(self, step: int, about: str, local: Tensor) -> None:
        eps = self._eps.setdefault(step, {})
        eps[about] = max(eps.get(about, 0.0), torch.finfo(local.dtype).eps)


def _measure_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of squares, the sum and the maximum of absolute values of each tensor: (3) float64.

    Avoids float64 copies of whole gradients, which are large. On a GPU `torch._foreach_norm` reads the
    gradients in their own dtype and accumulates in float64, with one launch for many tensors. On a CPU it
    would copy them, so the CPU path works in chunks.
    """
    if tensors and all(tensor.is_cuda for tensor in tensors):
        plain = [tensor.detach() for tensor in tensors]
        norms = [torch.stack(torch._foreach_norm(plain, order, dtype=torch.float64)) for order in _ORDERS]
        return list(torch.stack([norms[0].square(), *norms[1:]], dim=1))
    return [_measure_in_chunks(tensor.detach().reshape(-1)) for tensor in tensors]


def _measure_in_chunks(flat: Tensor) -> Tensor:
    parts = []
    for part in torch.split(flat, _CHUNK):
        wide = part.to(torch.float64).abs()
        parts.append(torch.stack([wide.square().sum(), wide.sum(), wide.amax()]))
    whole = torch.stack(parts)
    return torch.cat([whole[:, :2].sum(dim=0), whole[:, 2:].amax(dim=0)])


class Clip(Check[dict[int, StepGradients]]):
    """Gradient norm and clip coefficient of each step, on every rank."""

    name = CheckName.CLIP
    role = Role.ORIGIN
    recomputes_step = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[dict[int, StepGradients]]:
        """Return a watch that sums the squares; see `Check`."""
        # moeverify's norms are at least float32, whatever the dtype of the gradients. A framework may keep
        # the norm of each tensor in bfloat16.
        is_ours = program.custom_step is None and type(program.engine).norm is PlainEngine.norm
        return GradientWatch(norms_are_wide=is_ours)

    def judge(self, shown: ShownTensors, reports: Sequence[dict[int, StepGradients]]) -> CheckOutcome | None:
        """Return whether norm and coefficient follow from the gradients on every rank; see `Check`."""
        return judge_norms(shown, reports) if any(reports) else None


def judge_norms(shown: ShownTensors, reports: Sequence[dict[int, StepGradients]]) -> CheckOutcome:
    """Return the verdict, with a finding for each norm or coefficient that is wrong on some rank."""
    findings: list[Finding] = []
    limits: dict[Key, float] = {}
    worst: Worst | None = None
    # A user's own step may clip by a limit of its own. Then only the comparison with the golden covers the
    # coefficient.
    recipe = shown.case.recipe
    max_norm = recipe.optimizer.clip_norm if recipe.step is None else None
    own = {name for _, name in shown.list_own(CheckName.CLIP)}
    for step in sorted(set().union(*reports)):
        of_step = [report.get(step, StepGradients()) for report in reports]
        extremes = _find_extremes(of_step)
        for name in (each for each in (TOTAL, COEFFICIENT) if each not in own):
            measured = [_measure(name, each, extremes, max_norm, len(reports)) for each in of_step]
            rows = [(rank, *row) for rank, row in enumerate(measured) if row is not None]
            if not rows:
                continue
            rank, expected, actual, bound = max(rows, key=lambda row: _share(*row[1:]))
            error = _relative(expected, actual)
            key = (step, Kind.GRADIENT_NORM, name)
            limits[key] = bound
            if worst is None or error / bound > worst.error / worst.bound:
                worst = Worst(tensor=name, error=error, bound=bound, step=step)
            wrong = tuple(row[0] for row in rows if not _share(*row[1:]) <= 1.0)
            if wrong:
                facts = _gather_facts(name, of_step)
                findings.append(_make_finding(shown, key, wrong, (rank, expected, actual, bound), facts))
    result = CheckResult(
        name=CheckName.CLIP,
        verdict="mismatch" if findings else "pass",
        tensors=len(limits),
        worst=worst,
        facts=shown.describe_own(own),
    )
    return CheckOutcome(result, tuple(findings), limits)


def _find_extremes(of_step: Sequence[StepGradients]) -> tuple[float, float]:
    """Return the smallest and the largest norm over all choices of one replica per region.

    They are equal unless replicas differ.
    """
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for each in of_step:
        for region, square in each.squares.items():
            smallest, largest = found.get(region, (square, square))
            found[region] = (min(smallest, square), max(largest, square))
    least, most = (math.sqrt(sum(each[end] for each in found.values())) for end in (0, 1))
    return least, most


def _measure(
    name: str, each: StepGradients, extremes: tuple[float, float], max_norm: float | None, num_ranks: int
) -> tuple[float, float, float] | None:
    """Return (expected, actual, relative bound) of a norm or coefficient on one rank; None if it has none."""
    if name not in each.norms or (name == COEFFICIENT and max_norm is None):
        return None
    eps = max(each.eps.get(Kind.GRADIENT, 0.0), each.eps[name])
    if name == TOTAL:
        low, high = extremes
        if not math.isfinite(high):
            return None  # non-finite gradients have a non-finite norm
        actual = each.norms[name]
        # A NaN norm fails both comparisons, so it is compared with `high`.
        nearest = actual if low <= actual <= high else low if actual < low else high
        return nearest, actual, _norm_bound(eps, each.num_elements, num_ranks)
    assert max_norm is not None
    if math.isnan(each.norms[TOTAL]):
        return None
    # As in torch's clip_grads_with_norm_, from this rank's own norm: three roundings.
    expected = min(1.0, max_norm / (each.norms[TOTAL] + GUARD))
    return expected, each.norms[name], 4.0 * 0.5 * max(each.eps[name], each.eps[TOTAL])


def _norm_bound(eps: float, num_elements: int, num_ranks: int) -> float:
    """Return the largest relative error that rounding may cause in a norm.

    torch rounds to one dtype of machine epsilon `eps`: the norm of each tensor, its square, each sum over
    the ranks of a mesh, the root, and the norm of the norms. All these errors are relative, so the total
    has no larger relative error than one tensor. Inside a tensor torch sums in float32 at least, in vectors
    and blocks. There the error of n sums grows like sqrt(n).
    """
    inner = 2.0**-24 if eps > 2.0**-40 else 2.0**-53
    return 0.5 * eps * (8.0 + num_ranks) + 4.0 * inner * math.sqrt(num_elements)


def _relative(expected: float, actual: float) -> float:
    error = abs(actual - expected) / expected if expected > 0.0 else abs(actual)
    return error if math.isfinite(error) else math.inf


def _share(expected: float, actual: float, bound: float) -> float:
    return _relative(expected, actual) / bound


def _gather_facts(name: str, of_step: Sequence[StepGradients]) -> ClipFacts:
    """Return the facts that a diagnosis needs to tell which squares a norm counts.

    Without the details for a coefficient, or if some rank has no norm.
    """
    if name == COEFFICIENT or not all(name in each.norms for each in of_step):
        return ClipFacts(is_coefficient=name == COEFFICIENT)
    of_region: dict[tuple[str, str], float] = {}
    for each in reversed(of_step):  # where replicas differ, keep the lowest rank's
        of_region.update(each.squares)
    regions: dict[str, dict[str, float]] = {}
    for (parameter, region), square in of_region.items():
        regions.setdefault(parameter, {})[region] = square
    squares = {parameter: sum(known.values()) for parameter, known in regions.items()}
    sizes: dict[str, dict[str, tuple[float, float, int]]] = {}
    for each in reversed(of_step):
        for (parameter, region), size in each.sizes.items():
            sizes.setdefault(parameter, {})[region] = size
    joined = {
        parameter: (
            sum(absolute for absolute, _, _ in known.values()),
            max(largest for _, largest, _ in known.values()),
            sum(count for _, _, count in known.values()),
        )
        for parameter, known in sizes.items()
    }
    parts: dict[str, dict[int, str]] = {}
    held: dict[str, dict[int, dict[str, float]]] = {}
    for rank, each in enumerate(of_step):
        for parameter, region in each.squares:
            square = regions[parameter][region]
            held.setdefault(parameter, {}).setdefault(rank, {})[region] = square
            known = parts.setdefault(parameter, {})
            # A rank may hold several regions of one parameter, such as rows of experts that were moved.
            known[rank] = f"{known[rank]};{region}" if rank in known else region
    norms = tuple(each.norms[name] for each in of_step)
    eps = max(each.eps[name] for each in of_step)
    return ClipFacts(norms=norms, squares=squares, sizes=joined, held=held, parts=parts, eps=eps)


def _make_finding(
    shown: ShownTensors,
    key: Key,
    ranks: tuple[int, ...],
    row: tuple[int, float, float, float],
    facts: ClipFacts,
) -> Finding:
    rank, expected, actual, bound = row
    return shown.make_finding(
        CheckName.CLIP,
        key,
        ranks,
        rank=rank,
        error=_relative(expected, actual),
        bound=bound,
        scale=actual / expected if expected > 0.0 and math.isfinite(actual) else None,
        expected=expected,
        actual=actual,
        code=Cause.NORM,
        facts=facts,
        place=Place(ranks=ranks, stage=Stage.GRADIENT_NORM if key[2] == TOTAL else Stage.CLIP),
    )


CHECKS = (Clip(),)
