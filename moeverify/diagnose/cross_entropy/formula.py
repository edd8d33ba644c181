"""The cross entropy of each token, and its gradient, with a part of the formula otherwise.

Letters: b rows and s tokens of what is asked for, B and S of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moeverify.diagnose.cross_entropy.search import Cell, Formula
from moeverify.diagnose.cross_entropy.ways import (
    fit_functions,
    fit_gradients,
    list_gradient_ways,
    list_gradients,
    pass_through,
    weigh_gradient,
)
from moeverify.results.change import Change
from moeverify.train.data import IGNORED

EDGES = ("denominator", "label")
"""The two parts of the loss whose gradients may count otherwise: the softmax, and the label's logit."""

_MOST_PARTS = 8

# What is made of the loss (b, s) of each token, and of the probability of its label, exp(-loss).
_LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "base-2": lambda loss: loss / torch.log(torch.tensor(2.0, dtype=loss.dtype)),
    "base-10": lambda loss: loss / torch.log(torch.tensor(10.0, dtype=loss.dtype)),
    "probability": lambda loss: -(-loss).exp(),
    "missing-probability": lambda loss: 1.0 - (-loss).exp(),
    "squared": torch.square,
    "exponential": torch.exp,
}
_FITTED: Mapping[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "focal": (lambda loss, gamma: (1.0 - (-loss).exp()) ** gamma * loss, (1.0, 2.0)),
    "guarded": (lambda loss, eps: -((-loss).exp() + eps).log(), (1e-8, 1e-4)),
    "capped": (lambda loss, cap: loss.clamp(max=cap), (3.0, 10.0)),
    "plus": (lambda loss, number: loss + number, (0.7,)),
    "minus": (lambda loss, number: loss - number, (0.7,)),
}


_ADDED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log-sum-squared": lambda logits, loss: logits.logsumexp(-1).square(),
    "log-sum": lambda logits, loss: logits.logsumexp(-1),
    "missing-probability": lambda logits, loss: 1.0 - (-loss).exp(),
    "squared-loss": lambda logits, loss: loss.square(),
    "entropy": lambda logits, loss: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1),
    "largest-logit": lambda logits, loss: logits.amax(-1),
    "mean-logit": lambda logits, loss: logits.mean(-1),
    "squared-logits": lambda logits, loss: logits.square().mean(-1),
    "label-logit": lambda logits, loss: logits.logsumexp(-1) - loss,
}
"""What may be added to each token's loss (b, s), by its logits (b, s, V) and the right loss."""


class CrossEntropyFormula(Formula):
    """log sum exp(logits) - logit of the label, zero where the label is ignored: (b, s, 1)."""

    def __init__(self, logits: Tensor, labels: Tensor) -> None:
        self.logits, self.labels = logits, labels
        size = logits.shape[-1]
        parts = [n for n in range(2, _MOST_PARTS + 1) if size % n == 0]
        self.ways = [Change(part="loss", way=way) for way in _LOSSES]
        self.ways += [Change(part="softmax-twice", way="probabilities")]
        self.ways += [
            Change(part="denominator", way=way)
            for way in ("without-label", "largest", "less-largest", "mean", "over-positions")
        ]
        self.ways += [
            Change(part="denominator", way=way, number=n)
            for n in parts
            for way in ("own-part", "first-part", "sum-of-parts", "mean-of-parts", "all-twice")
        ]
        self.ways += [Change(part="label", way="of-position", number=number) for number in (1, -1, 2)]
        self.ways += [Change(part="label", way="of-row", number=1)]
        self.ways += [Change(part="label", way="class", number=number) for number in (1, -1, size // 2)]
        self.fits = [
            *(Change(part="smoothing", way=way, number=0.1) for way in ("all", "all-subtracted")),
            *(
                Change(part="added", way=way, number=number, name=name)
                for name in _ADDED
                for way in ("added", "subtracted")
                for number in (1e-4, 1e-2, 0.5)
            ),
            *fit_functions("logits-through"),
            *(
                Change(part="loss", way=way, number=start)
                for way, (_, starts) in _FITTED.items()
                for start in starts
            ),
        ]

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the losses of a cell."""
        loss = self.compute(self.logits[cell.rows], self._label(changes)[cell.rows], changes)
        return loss[:, cell.positions].unsqueeze(-1)

    def _label(self, changes: Mapping[str, Change]) -> Tensor:
        """Return the labels (B, S), or those of others where a label is there."""
        change = changes.get("label")
        if change is None:
            return self.labels
        number = int(change.number or 0)
        if change.way == "class":
            found = (self.labels + number) % self.logits.shape[-1]
        else:
            found = self.labels.roll(-number, 0 if change.way == "of-row" else 1)
        return torch.where(self.labels == IGNORED, self.labels, found.clamp(min=0))

    def compute(self, logits: Tensor, labels: Tensor, changes: Mapping[str, Change]) -> Tensor:
        """Return the losses (b, S) of logits (b, S, V) and labels (b, S)."""
        counts, at = labels != IGNORED, labels.clamp(min=0).unsqueeze(-1)
        logits = pass_through(logits, changes.get("logits-through"))
        logits = logits.softmax(-1) if "softmax-twice" in changes else logits
        logits = weigh_gradient(logits, "logits", changes)
        below = weigh_gradient(self._sum(logits, at, changes.get("denominator")), "denominator", changes)
        label = weigh_gradient(logits.gather(-1, at).squeeze(-1), "label", changes)
        loss = below - label
        smoothing, added = changes.get("smoothing"), changes.get("added")
        if smoothing is not None:
            share = float(smoothing.number or 0.0)
            others = below - logits.mean(-1)
            share = -share if smoothing.way == "all-subtracted" else share
            loss = (1.0 - share) * loss + share * others
        if added is not None:
            times = float(added.number or 0.0) * (1.0 if added.way == "added" else -1.0)
            loss = loss + times * _ADDED[added.name](logits, loss)
        change = changes.get("loss")
        if change is not None and change.way in _FITTED:
            loss = _FITTED[change.way][0](loss, float(change.number or 0.0))
        elif change is not None:
            loss = _LOSSES[change.way](loss)
        return loss * counts

    def _sum(self, logits: Tensor, at: Tensor, change: Change | None) -> Tensor:
        """Return the logarithm of the sum of exponentials (b, S), of all logits or otherwise."""
        if change is None:
            return logits.logsumexp(-1)
        count = int(change.number or 1)
        parts = logits.view(*logits.shape[:-1], count, -1).logsumexp(-1)
        hidden = torch.zeros_like(logits).scatter(-1, at, torch.inf)
        ways: Mapping[str, Callable[[], Tensor]] = {
            "without-label": lambda: (logits - hidden).logsumexp(-1),
            "largest": lambda: logits.amax(-1),
            "less-largest": lambda: logits.logsumexp(-1) - logits.amax(-1),
            "mean": lambda: logits.mean(-1),
            "over-positions": lambda: logits.logsumexp(-2).gather(-1, at.squeeze(-1)),
            "own-part": lambda: parts.gather(-1, at * count // logits.shape[-1]).squeeze(-1),
            "first-part": lambda: parts[..., 0],
            "sum-of-parts": lambda: parts.sum(-1),
            "mean-of-parts": lambda: parts.mean(-1),
            "all-twice": lambda: logits.logsumexp(-1) + torch.tensor(float(count)).log(),
        }
        return ways[change.way]()


class CrossEntropyGradientFormula(Formula):
    """What the mean of these losses over all that count passes back to the logits: (b, s, V)."""

    def __init__(self, forward: CrossEntropyFormula) -> None:
        self.forward = forward
        self.num_valid = int((forward.labels != IGNORED).sum())
        self.ways = [*list_gradients(*EDGES), *forward.ways]
        self.ways += list_gradient_ways("logits")
        self.fits = [*fit_gradients(*EDGES), *forward.fits]

    def evaluate(self, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the gradient at a cell."""
        with torch.enable_grad():
            leaf = self.forward.logits[cell.rows].clone().requires_grad_()
            loss = self.forward.compute(leaf, self.forward._label(changes)[cell.rows], changes)
            found = _pull_back(loss, leaf, torch.full_like(loss, 1.0 / max(self.num_valid, 1)))
        found, (vocabulary,) = found[:, cell.positions], cell.dims
        return found if len(vocabulary) == found.shape[-1] else found.index_select(-1, vocabulary)


def _pull_back(output: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of a leaf, zeros where the output does not depend on it."""
    if not output.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(output, leaf, gradient, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found
