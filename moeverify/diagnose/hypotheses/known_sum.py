"""Hypothesis: what a module made is a sum of a few tensors that one device had before, which the right one is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import EXACT, WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.known_sum import KnownSum, Term
from moeverify.results.trial import Reason
from moeverify.train.module_taps import FORWARD

MOST_TERMS = 3
EXPECTED = ""  # the name of what it should be
_MOST_KNOWN = 40  # tensors: sums of three of them are 1e4
_SAMPLE = 1 << 14  # elements that a fit looks at; all are looked at by what it finds
_NEAR = 1e-5  # relative error by normal equations under which a sum is fitted exactly
_LEAST = 1e-6  # a smaller coefficient is none
_LEAST_ROWS = 64  # elements to each coefficient, so that a fit is no chance


@dataclass(frozen=True)
class _Fit:
    """Terms by their number, the coefficient of each, and the share of the error that is left."""

    numbers: tuple[int, ...]
    factors: tuple[float, ...]
    residual: float


class SumOfKnown(Hypothesis):
    """Least squares of what went wrong first on the tensors of its shape that were right before it.

    The fewest terms that leave nothing but rounding are the cause: with ten digits of each of thousands of elements,
    a fit of three numbers is no chance. Of several sums with as few terms all are named, up to three.
    """

    name = "known_sum"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit one, two, and three terms."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        if origin is None or inputs.search is None or origin.are_rows or tensor.exact > EXACT:
            return self.untried(Reason.NOT_COMPARABLE)
        known = list_known(origin, inputs.search)
        wrong = [shard for shard in tensor.shards if tensor.error_of(shard) > inputs.search.bound]
        if any(shard.local is None for shard in wrong) or len(known) < 2:
            return self.untried(Reason.NOT_COMPARABLE)
        names, values = list(known), list(known.values())
        actual = torch.cat([shard.values().flatten() for shard in wrong])
        columns = torch.stack(
            [torch.cat([shard.region.take(value).flatten() for shard in wrong]) for value in values]
        )
        if not bool(actual.isfinite().all()) or actual.numel() < _LEAST_ROWS * MOST_TERMS:
            return self.untried(Reason.NOT_COMPARABLE)
        found = fit_sums(actual, columns, columns[0])
        if not found or len(found) > MOST_TERMS:
            return self.refuse()
        sums = tuple(
            tuple(
                Term(tensor=names[number], factor=factor)
                for number, factor in zip(fit.numbers, fit.factors, strict=True)
            )
            for fit in found
        )
        ranks = tuple(sorted({shard.rank for shard in wrong})) if len(wrong) < len(tensor.shards) else ()
        operation = KnownSum(sums=sums, ranks=ranks)
        cause = Cause.FORWARD if tensor.quantity is Quantity.OUTPUT else Cause.BACKWARD
        residual = max(fit.residual for fit in found)
        return self.accept(explain_by(cause, operation, tensors, inputs, residual=residual))


def list_known(origin: Origin, search: Search) -> dict[str, Tensor]:
    """Return what it should be, and what one device had read before in its shape: by name, the latest first.

    A name is `end:module`. What comes later may be made of it.
    """
    expected = origin.tensor.expected
    readings = [each for each in search.golden if each.direction == origin.direction and not each.is_loose]
    own = [each for each in readings if (each.module, each.end) == (origin.module, origin.end)]
    made = "output" if origin.direction == FORWARD else "input"
    before = min((each.order for each in own), default=0)
    earlier = [each for each in readings if each.order < before and each.local.shape == expected.shape]
    found = {EXPECTED: expected.double()}
    # What one module puts out others take: it is named by the module that has made it.
    for each in sorted(earlier, key=lambda reading: (reading.end == made, reading.order), reverse=True):
        value = each.local.double()
        if bool(value.any()) and not any(torch.equal(value, other) for other in found.values()):
            found[f"{each.end}:{each.module}"] = value
        if len(found) >= _MOST_KNOWN:
            break
    return found


def fit_sums(actual: Tensor, columns: Tensor, expected: Tensor) -> list[_Fit]:
    """Return the sums of the fewest columns (n, elements) that are the actual values, to rounding."""
    stride = max(1, math.ceil(actual.numel() / _SAMPLE))
    some, wanted = columns[:, ::stride], actual[::stride]
    scales = some.norm(dim=1).clamp(min=1e-300)
    unit = some / scales[:, None]
    gram, moment, size = unit @ unit.T, unit @ wanted, float(wanted.norm())
    for count in range(1, MOST_TERMS + 1):
        found = [
            fit
            for numbers in _list_near(gram, moment, size, count)
            if (fit := _confirm(numbers, actual, columns, expected)) is not None
        ]
        if found:
            return found
    return []


def _list_near(gram: Tensor, moment: Tensor, size: float, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the columns whose sums come near, by normal equations."""
    sets = torch.tensor(list(combinations(range(len(gram)), count)))
    if not len(sets):
        return
    inner = gram[sets[:, :, None], sets[:, None, :]]
    right = moment[sets]
    regular = torch.linalg.det(inner) > 1e-9  # columns that say the same have no coefficients of their own
    sets, inner, right = sets[regular], inner[regular], right[regular]
    factors = torch.linalg.solve(inner, right.unsqueeze(-1)).squeeze(-1)
    left = size**2 - (factors * right).sum(-1)
    for numbers in sets[left <= (_NEAR * size) ** 2].tolist():
        yield tuple(numbers)


def _confirm(numbers: tuple[int, ...], actual: Tensor, columns: Tensor, expected: Tensor) -> _Fit | None:
    chosen = columns[list(numbers)].T
    solved = torch.linalg.lstsq(chosen, actual.unsqueeze(-1)).solution.squeeze(-1)
    factors = [float(f"{value:.6g}") for value in solved.tolist()]
    snapped = torch.tensor(factors, dtype=chosen.dtype)
    error, allowed = float((actual - expected).norm()), EXACT * float(expected.norm())
    allowed = min(allowed, 1e-3 * error)
    # A coefficient of few digits, which somebody may have written, is said where it leaves as little.
    if float((chosen @ snapped - actual).norm()) > allowed:
        factors = solved.tolist()
        snapped = solved
    left = float((chosen @ snapped - actual).norm())
    if not left <= allowed or min(map(abs, factors)) < _LEAST:
        return None
    return _Fit(numbers, tuple(factors), left / error)


HYPOTHESIS = SumOfKnown()
