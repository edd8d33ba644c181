"""Gradients of parameters, recomputed as sums over all ranks' calls of modules.

Each rank replays its calls of a module with one device's module (`module_replay`). It keeps a sample of their
contributions to the gradients of the module's parameters, in the precision of the recipe and in float64. The
sum over the parts of the batch is the gradient, whichever ranks hold it and whichever collectives sum it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moeverify.parallel.regions.region import Region
from moeverify.verification.checks.module_replay import ModuleCall, Obstacle, Widen, require_tokens, run

MOST_SAMPLED = 1 << 11
"""Maximum number of elements that are recomputed per parameter."""


_MOST_OFF = 0.05  # of a scale; the next simple one is much further away for a few ranks


def find_stride(numel: int) -> int:
    """Return the distance of the sampled elements: odd, so that they are in all columns of even widths."""
    return -(-numel // MOST_SAMPLED) | 1


@dataclass
class ContributionSamples:
    """Samples of the contribution of one module's calls to a gradient; shapes (sampled elements), float64.

    `narrow` is in the precision of the recipe, and `wide` in float64.
    """

    narrow: Tensor
    wide: Tensor

    def add(self, other: ContributionSamples) -> ContributionSamples:
        """Return the sums of both."""
        return ContributionSamples(self.narrow + other.narrow, self.wide + other.wide)

    def divide(self, number: float) -> ContributionSamples:
        """Return the sums divided by a number."""
        return ContributionSamples(self.narrow / number, self.wide / number)


@dataclass(frozen=True)
class Held:
    """Sampled elements of a complete gradient that a rank holds; shapes (elements)."""

    places: Tensor
    values: Tensor


@dataclass
class StepSums:
    """One rank's part of a step.

    `added` is by parameter and module; `held` is by parameter. `owners` has the innermost modules that have a
    parameter, and `share` identifies the rank's part of the batch. A user's own step may scale all gradients by
    the number of ranks of some axes (`is_scaled`); their norm decides whether the scale is right.
    """

    share: str
    is_scaled: bool = False
    added: dict[str, dict[str, ContributionSamples]] = field(default_factory=dict)
    held: dict[str, list[Held]] = field(default_factory=dict)
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SumComparison:
    """A gradient and its recomputed sum: relative errors of the ranks and of one device, and the worst rank."""

    error: float
    rounding: float
    rank: int
    ranks: tuple[int, ...]


def hold(local: Tensor, region: Region) -> Held:
    """Return the sampled elements of a rank's shard of a gradient."""
    stride = find_stride(torch.Size(region.shape).numel())
    index = region.flat_index(device=local.device).reshape(-1)
    # The elements that `_sample` takes of a whole gradient.
    chosen = index % stride == 0
    values = local.detach().reshape(-1)[chosen]
    return Held((index[chosen] // stride).cpu(), values.to("cpu", torch.float64))


def find_owners(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return the innermost of these modules that have each parameter, by its first name in the model.

    A parameter that the model also uses outside of these modules has no entry.
    """
    within: dict[int, set[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters():
            within.setdefault(id(parameter), set()).add(name)
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters():
        holders = within.get(id(parameter), set())
        innermost = [
            each for each in holders if not any(other.startswith(f"{each}.") for other in holders - {each})
        ]
        places = [path for path, each in model.named_parameters(remove_duplicate=False) if each is parameter]
        is_covered = all(any(path.startswith(f"{each}.") for each in innermost) for path in places)
        if innermost and is_covered:
            found[name] = tuple(sorted(innermost))
    return found


def sum_calls(
    calls: Sequence[ModuleCall],
    narrow: nn.Module,
    wide: nn.Module,
    names: Mapping[str, str],
    tokens: tuple[int, int],
    unit: float,
) -> dict[str, ContributionSamples]:
    """Return the contributions of a module's calls to gradients, by parameter names of the model.

    `names` maps the names in the module to those in the model. Takes the other arguments of `replay`.

    Raises: Obstacle.
    """
    found: dict[str, ContributionSamples] = {}
    for call in calls:
        require_tokens(call, tokens)
        try:
            _, near = run(narrow, call, nn.Identity(), unit, of_parameters=True)
            _, exact = run(wide, call, Widen(), unit, of_parameters=True)
        except Obstacle:
            raise
        except Exception as error:  # of user code, such as another signature
            raise Obstacle("does not run on one device with the rank's inputs") from error
        for inner in near.keys() & exact.keys() & names.keys():
            added = ContributionSamples(_sample(near[inner]), _sample(exact[inner]))
            known = found.get(names[inner])
            found[names[inner]] = added if known is None else known.add(added)
    return found


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.detach().reshape(-1)
    return flat[:: find_stride(flat.numel())].to("cpu", torch.float64)


def _sum_up(of_ranks: Sequence[StepSums], name: str) -> ContributionSamples | None:
    """Return the sum over the parts of the batch and over the modules that use a parameter, if all are known.

    Ranks with the same part of the batch have the same calls, or calls of different modules. If a rank could
    not replay a module, the module around it takes its place.
    """
    owners = set(next((each.owners[name] for each in of_ranks if name in each.owners), ()))
    shares = {each.share for each in of_ranks}
    by_share: dict[str, dict[str, ContributionSamples]] = {share: {} for share in shares}
    for each in of_ranks:
        for module, sums in each.added.get(name, {}).items():
            by_share[each.share].setdefault(module, sums)
    known = set.intersection(*(set(found) for found in by_share.values()))
    chosen = _choose(owners, known)
    if not chosen:
        return None
    total: ContributionSamples | None = None
    for found in by_share.values():
        for module in chosen:
            total = found[module] if total is None else total.add(found[module])
    return total


def _choose(owners: set[str], known: Collection[str]) -> set[str]:
    """Return the owners, each replaced by the nearest known module around it; empty if there is none."""
    chosen: set[str] = set()
    for owner in owners:
        around = owner
        while around and around not in known:
            around = around.rpartition(".")[0]
        if not around:
            return set()
        chosen.add(around)
    return {each for each in chosen if not any(each.startswith(f"{other}.") for other in chosen)}


def compare_sums(of_ranks: Sequence[StepSums]) -> dict[str, SumComparison]:
    """Compare each gradient of a step with its recomputed sum, if the ranks know all contributions."""
    names = dict.fromkeys(name for each in of_ranks for name in each.held)
    sums = {name: each for name in names if (each := _sum_up(of_ranks, name)) is not None}
    if any(each.is_scaled for each in of_ranks):
        scale = _fit_scale(of_ranks, sums)
        sums = {name: each.divide(scale) for name, each in sums.items()}
    return {name: _compare(of_ranks, name, each) for name, each in sums.items() if bool(each.wide.any())}


def _fit_scale(of_ranks: Sequence[StepSums], sums: Mapping[str, ContributionSamples]) -> float:
    """Return the number, or its inverse, by which most gradients are smaller than their sums; else 1."""
    ratios = []
    for name, each in sums.items():
        for held in (part for of_rank in of_ranks for part in of_rank.held.get(name, ())):
            wide = each.wide[held.places]
            if bool(wide.any()):
                ratios.append(float(held.values @ wide / (wide @ wide)))
    # The median leaves out gradients that are wrong for another reason.
    middle = statistics.median(ratios) if ratios else 1.0
    for number in range(1, len(of_ranks) + 1):
        for scale in (float(number), 1.0 / number):
            if abs(middle * scale - 1.0) <= _MOST_OFF:
                return scale
    return 1.0


def _compare(of_ranks: Sequence[StepSums], name: str, sums: ContributionSamples) -> SumComparison:
    """Compare a gradient with its recomputed sum, which must not be zero."""
    norm = float(sums.wide.norm())
    errors = [_measure(each.held.get(name, ()), sums.wide) for each in of_ranks]
    # Several ranks may hold an element: the mean of their squared errors counts.
    count, total = torch.zeros_like(sums.wide), torch.zeros_like(sums.wide)
    for held in (part for each in of_ranks for part in each.held.get(name, ())):
        count[held.places] += 1.0
        total[held.places] += (held.values - sums.wide[held.places]).square()
    return SumComparison(
        # Elements that no rank holds have a total of zero.
        error=float((total / count.clamp(min=1.0)).sum().sqrt()) / norm,
        rounding=float((sums.narrow - sums.wide).norm()) / norm,
        rank=max(range(len(errors)), key=errors.__getitem__),
        ranks=tuple(rank for rank, own in enumerate(errors) if own > 0.0),
    )


def _measure(held: Sequence[Held], expected: Tensor) -> float:
    squares = sum(float((each.values - expected[each.places]).square().sum()) for each in held)
    # `max` cannot order NaN.
    return math.inf if math.isnan(squares) else squares
