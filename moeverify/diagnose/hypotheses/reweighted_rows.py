"""Hypothesis: a module sums right rows, such as what experts made of copies of its tokens, by other weights.

Backward it sums the gradients of the copies, each by one, beside what comes back by other ways.

It is asked of models whose formulas are not known: a mixture of experts of a user's own returns for each token a sum
over copies of it, y_t = sum over j of w_tj e_tj. Its weights follow from the golden's output, and those of the ranks
from what they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.slices import MOST_SLICES, measure_distances, scale_rows
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import Distance
from moeverify.results.operation import Reweighted
from moeverify.results.trial import Reason
from moeverify.train.module_taps import FORWARD, Reading

_SPARE = 4  # numbers of a token beyond one for each of its copies: fewer prove nothing
_NEAR = 1e-6  # of a weight that a fit has found in float64


@dataclass(frozen=True)
class Copies:
    """What one module returns of copies of some tokens, or their gradients: `rows` (tokens, copies, width)."""

    module: str
    tokens: Tensor
    rows: Tensor
    num_rows: int


class ReweightedRows(Hypothesis):
    """What every wrong token has is a sum of its own copies, and so is the golden's."""

    name = "reweighted_rows"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Fit the weights of each module inside that takes and returns copies of the tokens."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        if origin is None or inputs.search is None or tensor.expected.ndim != 3:
            return self.untried(Reason.NOT_COMPARABLE)
        worst: float | None = None
        for copies in list_copies(origin, inputs.search):
            wanted, found = (each.flatten(0, 1)[copies.tokens] for each in (tensor.expected, tensor.whole))
            if origin.direction == FORWARD:
                right, left_of_right = fit_weights(copies.rows, wanted, wanted)
                weights, left = fit_weights(copies.rows, found, found)
            else:
                left_of_right = 0.0
                right = torch.ones(copies.rows.shape[:2], dtype=wanted.dtype)
                more, left = fit_weights(copies.rows, found - wanted, wanted)
                weights = right + more
            worst = max(left, left_of_right)
            if worst <= inputs.search.bound:
                operation = _describe(copies, right, weights)
                cause = Cause.FORWARD if origin.direction == FORWARD else Cause.BACKWARD
                explanation = explain_by(cause, operation, tensors, inputs, residual=worst)
                return self.accept(explanation, Distance(error=worst))
        if worst is None:
            return self.untried(Reason.NOT_COMPARABLE)
        return self.refuse(Distance(error=worst))


def list_copies(origin: Origin, search: Search) -> Iterator[Copies]:
    """Yield what modules inside the culprit make of copies of its tokens, where these are right."""
    if origin.input is None or not origin.is_of_culprit:
        return
    width = origin.tensor.expected.shape[-1]
    tokens = origin.input.flatten(0, 1).to(torch.float64)
    end = "output" if origin.direction == FORWARD else "input"
    for module in origin.inside:
        taken = _read(search.golden, (module, FORWARD, "input"))
        made = _read(search.golden, (module, origin.direction, end))
        if taken is None or made is None or len(taken) != len(made) or len(made) > MOST_SLICES:
            continue
        if made.shape[1] == width and taken.shape[1] == tokens.shape[1]:
            yield from _match_copies(module, tokens, taken, made)


def _read(golden: Sequence[Reading], at: tuple[str, str, str]) -> Tensor | None:
    """Return the loose rows, float64, that one device read at an end of a module."""
    for reading in golden:
        if reading.is_loose and (reading.module, reading.direction, reading.end) == at:
            return reading.local.to(torch.float64)
    return None


def _match_copies(module: str, tokens: Tensor, taken: Tensor, made: Tensor) -> Iterator[Copies]:
    """Yield the copies of the tokens that have equally many, as most have; of tokens with a twin nobody can tell."""
    equal = measure_distances(taken, tokens) == 0.0
    is_single = (measure_distances(tokens, tokens) == 0.0).sum(dim=1) == 1
    counts = equal.sum(dim=0)
    most = Counter(int(count) for count in counts[is_single] if count > 1).most_common(1)
    if not most:
        return
    ((num_copies, _),) = most
    chosen = (is_single & (counts == num_copies)).nonzero().flatten()
    if num_copies + _SPARE <= made.shape[1] and 2 * len(chosen) >= len(tokens):
        rows = torch.stack([made[equal[:, token]] for token in chosen])
        yield Copies(module, chosen, rows, num_copies * len(chosen))


def fit_weights(rows: Tensor, output: Tensor, scale: Tensor) -> tuple[Tensor, float]:
    """Return the weights (tokens, copies) of an output, and the most that is left of a token, by `scale`."""
    weights = torch.linalg.lstsq(rows.transpose(1, 2), output[..., None], driver="gelsd").solution[..., 0]
    left = (output - (weights[..., None] * rows).sum(dim=1)).norm(dim=1)
    return weights, float((left / scale_rows(scale)).amax())


def _describe(copies: Copies, right: Tensor, weights: Tensor) -> Reweighted:
    """Return what the weights (tokens, copies) are where they are not the right ones."""
    scale = right.abs().amax(dim=1, keepdim=True)
    is_wrong = (weights - right).abs() > _NEAR * scale
    at = is_wrong.any(dim=1)
    num_wrong = int(is_wrong.sum())
    totals, ratios = weights[at].sum(dim=1), weights[at] / right[at]
    way: Literal["left-out", "scaled", "normalized", "exchanged", "other"] = "other"
    total: float | None = None
    if bool((weights[is_wrong].abs() <= _NEAR * scale.expand_as(weights)[is_wrong]).all()):
        way = "left-out"
    elif _is_one(ratios.flatten()):
        way, total = "scaled", float(ratios.mean())
    elif _is_one(totals) and bool(((ratios - ratios[:, :1]).abs() <= _NEAR * ratios.abs()).all()):
        way, total = "normalized", float(totals.mean())
    elif bool(
        ((weights[at].sort(dim=1).values - right[at].sort(dim=1).values).abs() <= _NEAR * scale[at]).all()
    ):
        way = "exchanged"
    return Reweighted(rows=copies.module, way=way, num_wrong=num_wrong, num_rows=copies.num_rows, total=total)


def _is_one(values: Tensor) -> bool:
    """Return whether there are several, and they are one number."""
    return len(values) > 1 and bool(((values - values[0]).abs() <= _NEAR * values[0].abs()).all())


HYPOTHESIS = ReweightedRows()
