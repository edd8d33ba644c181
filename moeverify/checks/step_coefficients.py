"""Single numbers that change all coefficients of a moment: its decay, or the share of the step's addend.

A separate fit of each coefficient is less precise. A decay rounded to 16 bits is off by less than the error
of such a fit. If one factor applies to two terms, only one of them may look wrong.
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

_SUMS = 1e-12  # relative error of sums of squares, and of differences between them

_SURE = 8.0
"""Standard errors beyond which two numbers differ, and within which a number equals a known one."""

_EXACT = 1e-9

_OF_16_BITS = 2.0**-11
"""An eighth of a bfloat16 unit: the precision of 1 - decay in 16-bit kernels."""

_OWN = {"momentum_buffer": "momentum"}
"""Name of the term with a moment's previous value, where it differs from the moment's name."""


class _Fitted(NamedTuple):
    """A least-squares number with its standard error."""

    value: float
    error: float


def find_decay(row: Row, spec: Optimizer, precision: str = "float64") -> DecayFacts | None:
    """Return the wrong decay of a moment, where moment = decay * previous value + (1 - decay) * addend.

    Return None if the decay is the recipe's, or leaves more than rounding in some element. In the first
    step there is no previous value, so a decay is indistinguishable from a factor of the gradient. 16-bit
    kernels round options and products. The error of a fitted number there exceeds its standard error.
    """
    own, added = _split(row)
    if own is None or not added or not row.gram[own][own] > 0.0:
        return None
    expected = row.terms[own][1]
    if not 0.0 < expected < 1.0 or not math.isclose(row.terms[added[0]][1], 1.0 - expected, rel_tol=1e-9):
        return None
    # result - new = decay * (old - new), where the addend `new` has a total coefficient of 1.
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
        return None  # a factor of the addend alone explains it as well
    if precision == "bfloat16":
        found = found._replace(error=max(found.error, _OF_16_BITS * (1.0 - expected)))
    if not _is_other(found, expected):
        return None
    return DecayFacts(expected=expected, found=found.value, means=_name_decay(found, expected, spec))


def find_share(row: Row) -> ShareFacts | None:
    """Return the share of the step's addend in a moment, if its previous value is right; else None."""
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
    """Return the factor of a whole moment, if it is its bias correction or the inverse; else None.

    In the first step there is no previous value, so it is indistinguishable from a factor of the gradient.
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
    """Return the share, marked if it equals dampening by the momentum."""
    is_dampened = math.isclose(share.found, 1.0 - spec.momentum, rel_tol=1e-2)
    return share.model_copy(update={"is_dampened": is_dampened})


def _split(row: Row) -> tuple[int | None, Sequence[int]]:
    """Return the index of the term with the moment's previous value (None if absent), and the others."""
    if row.key[1] != Kind.OPTIMIZER_STATE:
        return None, ()
    moment = row.key[2].rpartition(".")[2]
    names = [name for name, _ in row.terms]
    wanted = _OWN.get(moment, moment)
    own = names.index(wanted) if wanted in names else None
    return own, [number for number in range(len(names)) if number != own]


def _fit(row: Row, *, offset: Tensor, direction: Tensor) -> _Fitted | None:
    """Return x of `result = offset + x * direction`; None if it leaves more than rounding.

    `offset` and `direction` (T + 1) are coefficients of the row's terms. The last element belongs to the
    result.
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
    """Return the meaning of a wrong decay, if exactly one known number fits."""
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
