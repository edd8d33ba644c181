"""One number that makes all coefficients of a moment other ones: its decay, or the share of what a step adds to it.

A free fit of each term's coefficient tells less: a decay that is rounded to 16 bits is off by less than such a fit
may be, and of two terms one may look wrong alone, where both are there by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeverify.case.schema import Optimizer
from moeverify.checks.recomputed_step import Row, allow
from moeverify.results.checks import Kind
from moeverify.results.step_facts import NEAR, DecayFacts, DecayMeaning, ShareFacts

_SUMS = 1e-12  # of sums of squares, by which differences of them may be off

_SURE = 8.0
"""By how many standard errors a number is another one, and within how many it is one that is known."""

_EXACT = 1e-9

_OF_16_BITS = 2.0**-11
"""An eighth of a unit of bfloat16: 1 - decay is known no better from kernels of 16 bits."""

_OWN = {"momentum_buffer": "momentum"}
"""The name of the term that is a moment's own value of the step before, where that is not the moment's."""


class _Fitted(NamedTuple):
    """A number by least squares, with its standard error."""

    value: float
    error: float


def find_decay(row: Row, spec: Optimizer, precision: str = "float64") -> DecayFacts | None:
    """Return the decay with which a moment is its own value and 1 - decay of what a step adds, or None.

    Only where it is not the recipe's, and leaves no more than rounding may in each element. In the first step, which
    has no value before, a decay looks like a factor of the gradient, and none is named. Kernels of 16 bits round
    the options themselves and each product, so that what is measured there is off by more than its standard error.
    """
    own, added = _split(row)
    if own is None or not added or not row.gram[own][own] > 0.0:
        return None
    expected = row.terms[own][1]
    if not 0.0 < expected < 1.0 or not math.isclose(row.terms[added[0]][1], 1.0 - expected, rel_tol=1e-9):
        return None
    # result - new = decay * (old - new), of what the step adds with a coefficient of 1 in all.
    new = torch.zeros(len(row.terms) + 1, dtype=torch.float64)
    for number in added:
        new[number] = row.terms[number][1] / (1.0 - expected)
    old = torch.zeros_like(new)
    old[own] = 1.0
    found = _fit(row, offset=new, direction=old - new)
    if found is None or not 0.0 <= found.value <= 1.0:
        return None
    kept = expected * old
    if _fit(row, offset=kept, direction=(1.0 - expected) * new) is not None:
        return None  # a factor of what is added alone explains it as well
    if precision == "bfloat16":
        found = found._replace(error=max(found.error, _OF_16_BITS * (1.0 - expected)))
    if not _is_other(found, expected):
        return None
    return DecayFacts(expected=expected, found=found.value, means=_name_decay(found, expected, spec))


def find_share(row: Row) -> ShareFacts | None:
    """Return which share of what a step adds to a moment is there, where the value before is right, or None."""
    own, added = _split(row)
    moving = [number for number in added if row.terms[number][1]]
    if not moving or row.key[1] != Kind.OPTIMIZER_STATE or row.key[2].rpartition(".")[2] not in _OWN:
        return None
    kept = torch.zeros(len(row.terms) + 1, dtype=torch.float64)
    if own is not None:
        kept[own] = row.terms[own][1]
    new = torch.zeros_like(kept)
    for number in moving:
        new[number] = row.terms[number][1]
    found = _fit(row, offset=kept, direction=new)
    if found is None or not _is_other(found, 1.0):
        return None
    return ShareFacts(found=found.value, terms=tuple(row.terms[number][0] for number in moving))


def find_corrected(row: Row, spec: Optimizer) -> ShareFacts | None:
    """Return by which factor all of a moment is there, where that is its bias correction or one over it, or None.

    In the first step, which has no value before, it looks like a factor of the gradient, and none is named.
    """
    own, added = _split(row)
    if own is None or not added or not row.gram[own][own] > 0.0:
        return None
    beta = row.terms[own][1]
    if not 0.0 < beta < 1.0 or beta not in spec.betas:
        return None
    correction = 1.0 - beta**row.number
    whole = torch.zeros(len(row.terms) + 1, dtype=torch.float64)
    whole[: len(row.terms)] = torch.tensor([coefficient for _, coefficient in row.terms])
    for factor in (1.0 / correction, correction):
        found = _fit(row, offset=torch.zeros_like(whole), direction=whole)
        if found is not None and math.isclose(
            found.value, factor, rel_tol=max(_SURE * found.error, NEAR / 2)
        ):
            names = tuple(row.terms[number][0] for number in (own, *added) if row.terms[number][1])
            return ShareFacts(found=factor, terms=names, is_corrected=True)
    return None


def name_share(share: ShareFacts, spec: Optimizer) -> ShareFacts:
    """Return the share with whether it is what a dampening by the momentum leaves."""
    is_dampened = math.isclose(share.found, 1.0 - spec.momentum, rel_tol=1e-2)
    return share.model_copy(update={"is_dampened": is_dampened})


def _split(row: Row) -> tuple[int | None, Sequence[int]]:
    """Return the number of the term that is the moment before the step, None where it has none, and the others."""
    if row.key[1] != Kind.OPTIMIZER_STATE:
        return None, ()
    moment = row.key[2].rpartition(".")[2]
    names = [name for name, _ in row.terms]
    wanted = _OWN.get(moment, moment)
    own = names.index(wanted) if wanted in names else None
    return own, [number for number in range(len(names)) if number != own]


def _fit(row: Row, *, offset: Tensor, direction: Tensor) -> _Fitted | None:
    """Return the number x of `result = offset + x * direction`, or None where more is left than rounding leaves.

    `offset` and `direction` (T + 1) are coefficients of the row's terms; the last place is the result's.
    """
    gram = torch.tensor(row.gram, dtype=torch.float64)
    if not bool(torch.isfinite(gram).all()):
        return None
    result = torch.zeros_like(offset)
    result[-1] = 1.0
    left = result - offset
    size2 = float(direction @ gram @ direction)
    total = float(gram[-1, -1]) + float(offset @ gram @ offset) + size2
    if not size2 > _SUMS * total:
        return None
    value = float(left @ gram @ direction) / size2
    rest = left - value * direction
    left2 = max(float(rest @ gram @ rest), 0.0)
    tried = offset + value * direction
    if not left2 <= allow(row, float(tried @ gram @ tried)) + _SUMS * total:
        return None
    spread = left2 / max(row.num_elements - 1, 1) + _SUMS * total / max(row.num_elements, 1)
    return _Fitted(value, math.sqrt(spread / size2))


def _is_other(found: _Fitted, expected: float) -> bool:
    return abs(found.value - expected) > _SURE * found.error + _EXACT


def _name_decay(found: _Fitted, expected: float, spec: Optimizer) -> DecayMeaning:
    """Return what a decay is that is not the recipe's, where one number that is known fits alone."""
    known: dict[DecayMeaning, float] = {"complement": 1.0 - expected}
    for dtype in (torch.bfloat16, torch.float16):
        rounded = float(torch.tensor(expected, dtype=dtype))
        name: DecayMeaning = "bfloat16" if dtype is torch.bfloat16 else "float16"
        known[name] = rounded
    others = [beta for beta in spec.betas if beta != expected]
    if len(others) == 1:
        known["other-beta"] = others[0]
    near = _SURE * found.error + _EXACT
    fitting = [name for name, value in known.items() if abs(value - found.value) <= near]
    return fitting[0] if len(fitting) == 1 else ""
