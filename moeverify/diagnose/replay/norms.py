"""Norms, forward and backward: what is divided, by which statistics of it, with which eps, weight and bias.

Letters: b rows and s tokens of what is asked for, H the width that is normalized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moeverify.diagnose.replay.gradient_ways import list_edge_ways, weigh_gradient
from moeverify.diagnose.replay.grammar import fit_terms, list_terms, times_of
from moeverify.diagnose.replay.language import Cell, Formula, draw_like
from moeverify.diagnose.replay.tokenwise import MOST_PARTS, ORDERS, Named, TokenFormula, list_orders
from moeverify.model.norm import LayerNorm, RMSNorm
from moeverify.results.change import Change

_MEANS = ("sum", "unbiased", "absolute", "deviation", "unbiased-deviation", "largest", "median", "none")
_OF_TOKENS = ("over-tokens", "over-positions", "over-rows", "over-all")
# One statistic for a block of positions, of (b, blocks, size, ...).
_OF_BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "over-blocks": lambda x: x.mean(2, keepdim=True),
    "largest-of-blocks": lambda x: x.amax(2, keepdim=True),
    "first-of-blocks": lambda x: x[:, :, :1],
    "last-of-blocks": lambda x: x[:, :, -1:],
}
_WEIGHTS = ("none", "plus-one", "minus-one", "twice", "before", "exponential")
_CENTRES = ("in-numerator", "in-statistics")
_DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_ROUNDED = ("squares", "root", "normed", "weight")
_EPS = ("none", "outside", "over-width", "times-width", "root")
# What a row may be divided by before its squares are taken, so that eps counts that square more often.
_SIZES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda x: x.abs().amax(-1, keepdim=True),
    "length": lambda x: x.norm(dim=-1, keepdim=True),
    "mean-size": lambda x: x.abs().mean(-1, keepdim=True),
    "deviation": lambda x: x.std(-1, correction=0, keepdim=True),
    "first-element": lambda x: x[..., :1],
}


class NormFormula(TokenFormula):
    """(x - mean) / sqrt(mean of squares + eps) * weight + bias; an RMSNorm has no mean and no bias."""

    edges = ("numerator", "mean", "statistics", "divisor", "normed")
    most_paired = 10

    def __init__(self, module: RMSNorm | LayerNorm, x: Tensor, others: Named, weights: Named) -> None:
        super().__init__(x, others)
        self.is_centred = isinstance(module, LayerNorm)
        self.eps, self.weight, self.weights = module.eps, module.weight.detach(), weights
        self.bias = module.bias.detach() if isinstance(module, LayerNorm) else None
        self.ways = [*self._list_ways(), *self.ways]
        # A norm of a multiple is the norm with another eps.
        fits = [fit for fit in self.fits if (fit.part, fit.way) != ("input-through", "times")]
        self.fits = [*self._list_fits(), *fits]
        edges = self.edges if self.is_centred else [edge for edge in self.edges if edge != "mean"]
        operands = ("weight", "root", "values", "normed")
        sizes = [n for n in range(2, MOST_PARTS + 1) if x.shape[-1] % n == 0]
        self.backward = [
            Change(part="statistics", way="detached"),
            *(Change(part="statistics", way="own-part", number=n) for n in sizes),
            *list_edge_ways(*edges, width=x.shape[-1], operands=operands),
        ]

    def _list_ways(self) -> list[Change]:
        width = self.x.shape[-1]
        ways = [Change(part="eps", way=way) for way in _EPS]
        ways += [Change(part="eps", way=way, name=name) for way in ("of", "outside-of") for name in _SIZES]
        ways += [Change(part="weight", way=way) for way in _WEIGHTS]
        ways += [Change(part="weight", way="of-module", name=name) for name in self.weights]
        ways += [*list_terms("bias"), Change(part="bias", way="scaled")] if self.bias is not None else []
        ways += [Change(part="centre", way="kept" if self.is_centred else "removed")]
        ways += [Change(part="centre", way=way) for way in _CENTRES]
        ways.append(Change(part="all", way="identity"))
        ways += [Change(part="mean", way=way) for way in (*_MEANS, *_OF_TOKENS)]
        blocks = [n for n in range(2, self.x.shape[1]) if self.x.shape[1] % n == 0]
        ways += [Change(part="mean", way=way, number=n) for n in blocks for way in _OF_BLOCKS]
        moves = [(way, number) for way in ("of-position", "of-row") for number in (1, -1)]
        ways += [Change(part="mean", way=way, number=number) for way, number in moves]
        sizes = [n for n in range(2, width + 1) if width % n == 0]
        ways += [Change(part="mean", way="parts", number=n) for n in sizes]
        sizes = [n for n in sizes if n <= MOST_PARTS]
        parts = ("first-part", "last-part", "every", "next-part")
        ways += [Change(part="mean", way=way, number=n) for n in sizes for way in parts]
        ways += [Change(part="weight", way=way, number=n) for n in sizes for way in list_orders(n)]
        return ways + [Change(part="rounded", way=way, name=name) for name in _ROUNDED for way in _DTYPES]

    def _list_fits(self) -> list[Change]:
        numbers = [Change(part="eps", way="value", number=number) for number in (1e-8, 1e-5, 1e-2)]
        numbers.append(Change(part="eps", way="outside-value", number=1e-3))
        numbers.append(Change(part="root", way="power", number=0.8))
        numbers += [
            Change(part=part, way="times", number=number)
            for part in ("mean", "weight")
            for number in (2.0, 0.5)
        ]
        numbers.append(Change(part="weight", way="plus", number=1.0))
        return numbers + (fit_terms("bias") if self.bias is not None else [])

    def redraw(self) -> Formula | None:
        """Return the norm of other tokens, with another weight and bias, and an eps that matters."""
        other = super().redraw()
        assert isinstance(other, NormFormula)
        # Tokens of all sizes, so that what differs where eps matters alone is not taken for equal.
        other.x = other.x * (2.0 * draw_like(self.x[..., :1], 49)).exp()
        other.weight, other.eps = draw_like(self.weight, 50), 0.05
        other.bias = None if self.bias is None else draw_like(self.bias, 51)
        other.weights = {name: draw_like(each, 60 + n) for n, (name, each) in enumerate(self.weights.items())}
        return other

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        """Return the normalized tokens."""
        if "all" in changes:
            return x
        weight, mean = changes.get("weight"), changes.get("mean")
        scale = _round(self._find_weight(weight), "weight", changes)
        is_before = weight is not None and weight.way == "before"
        x = x * scale if is_before else x
        x, taken = self._centre(x, changes)
        operands = {"weight": scale, "values": x}
        # In the width of x, as what is passed back to each element.
        square = weigh_gradient(taken.square(), "statistics", changes, operands)
        average = _round(self._average(taken, square, mean, cell), "squares", changes)
        if "statistics" in changes:
            average = self._detach(taken, average, mean, changes["statistics"], cell)
        root = self._take_root(x, average, changes)
        operands |= {"root": root, "normed": x / root}  # asked for when the gradient comes back
        divisor = weigh_gradient((1.0 / root).expand_as(x), "divisor", changes, operands)
        normed = weigh_gradient(x, "numerator", changes, operands) * divisor
        normed = weigh_gradient(_round(normed, "normed", changes), "normed", changes, operands)
        bias = changes.get("bias")
        if self.bias is not None and bias is not None and bias.way == "scaled":
            return (normed + self.bias) * scale
        normed = normed if is_before else normed * scale
        return normed if self.bias is None else normed + self.bias * times_of(bias)

    def _centre(self, x: Tensor, changes: Mapping[str, Change]) -> tuple[Tensor, Tensor]:
        """Return what is divided, and that of which the squares are taken, less its mean where it should be."""
        way = changes["centre"].way if "centre" in changes else ""
        is_centred = self.is_centred != (way in ("kept", "removed"))
        mean = x.mean(-1, keepdim=True)
        operands = {"weight": self.weight, "values": x}
        centred = x - weigh_gradient(mean.expand_as(x), "mean", changes, operands)
        if way == "in-numerator":  # as it should be in the statistics, and the other way in the numerator
            return (x, centred) if self.is_centred else (centred, x)
        if way == "in-statistics":
            return (centred, x) if self.is_centred else (x, centred)
        return (centred, centred) if is_centred else (x, x)

    def _take_root(self, x: Tensor, average: Tensor, changes: Mapping[str, Change]) -> Tensor:
        """Return what x (b, s, H) is divided by, from the mean of its squares."""
        eps, way = changes.get("eps"), changes["eps"].way if "eps" in changes else ""
        width, number = x.shape[-1], 0.0 if eps is None else float(eps.number or 0.0)
        if way.startswith("outside"):
            root = average.sqrt()
            size = _SIZES[eps.name](x) if eps is not None and eps.name else 1.0
            return root + (number if way == "outside-value" else self.eps * size)
        adds: Mapping[str, Callable[[], Tensor | float]] = {
            "": lambda: self.eps,
            "none": lambda: 0.0,
            "value": lambda: number,
            "of": lambda: self.eps * _SIZES[eps.name if eps is not None else ""](x).square(),
            "over-width": lambda: self.eps / width,
            "times-width": lambda: self.eps * width,
            "root": lambda: self.eps**0.5,
        }
        power = 0.5 if "root" not in changes else float(changes["root"].number or 0.0)
        root = (average + adds[way]()) ** power
        return _round(root, "root", changes)

    def _detach(self, x: Tensor, average: Tensor, mean: Change | None, change: Change, cell: Cell) -> Tensor:
        """Return the mean of squares without a gradient, or with that of each part of the width in it alone."""
        if change.way == "own-part":
            size = int(change.number or 1)
            parts = x.view(*x.shape[:-1], size, -1)
            # Of what divides a part, that part alone has a gradient.
            found = [
                self._average(own, own.square(), mean, cell).expand_as(x)
                for is_own in torch.eye(size, dtype=torch.bool).unsqueeze(-1)
                for own in [torch.where(is_own, parts, parts.detach()).flatten(-2)]
            ]
            width = x.shape[-1] // size
            return torch.cat([each[..., n * width : (n + 1) * width] for n, each in enumerate(found)], dim=-1)
        return average.detach()

    def _find_weight(self, change: Change | None) -> Tensor:
        if change is not None and change.way == "of-module":
            return self.weights[change.name]
        if change is not None and change.way in ORDERS:
            return self.weight[ORDERS[change.way](torch.arange(len(self.weight)), int(change.number or 1))]
        ways = {
            "none": torch.ones_like(self.weight),
            "plus-one": self.weight + 1.0,
            "twice": self.weight.square(),
            "times": self.weight * times_of(change),
            "plus": self.weight + times_of(change),
            "exponential": self.weight.exp(),
            "minus-one": self.weight - 1.0,
        }
        return self.weight if change is None else ways.get(change.way, self.weight)

    def _average(self, x: Tensor, square: Tensor, change: Change | None, cell: Cell) -> Tensor:
        """Return the mean of the squares of x (b, s, H), broadcast to it."""
        way, width = "" if change is None else change.way, x.shape[-1]
        number = 1 if change is None else int(change.number or 1)
        if way in ("parts", "next-part"):
            parts = square.view(*square.shape[:-1], number, -1).mean(-1, keepdim=True)
            parts = parts.roll(-1, -2) if way == "next-part" else parts
            return parts.expand(*parts.shape[:-1], width // number).flatten(-2)
        if way in (*_OF_TOKENS, *_OF_BLOCKS, "of-position", "of-row"):
            return self._average_others(way, number, cell)
        whole = square.mean(-1, keepdim=True)
        count = width // number if way.endswith("-part") else width
        ways: Mapping[str, Callable[[], Tensor]] = {
            "times": lambda: whole * (1.0 if change is None else float(change.number or 1.0)),
            "first-part": lambda: square[..., :count].mean(-1, keepdim=True),
            "last-part": lambda: square[..., -count:].mean(-1, keepdim=True),
            "every": lambda: square[..., ::number].mean(-1, keepdim=True),
            "sum": lambda: whole * width,
            "unbiased": lambda: whole * width / max(width - 1, 1),
            "absolute": lambda: x.abs().mean(-1, keepdim=True).square(),
            "largest": lambda: square.amax(-1, keepdim=True),
            "median": lambda: square.median(-1, keepdim=True).values,
            "deviation": lambda: x.var(-1, correction=0, keepdim=True),
            "unbiased-deviation": lambda: x.var(-1, correction=1, keepdim=True),
            "none": lambda: torch.ones_like(whole),
        }
        return ways[way]() if way in ways else whole

    def _average_others(self, way: str, number: int, cell: Cell) -> Tensor:
        """Return the mean of squares over other tokens of the call (b, s, ..., H), or of another token."""
        asked = cell.of_call()
        whole = self.x[asked.rows][:, asked.positions]
        square = (whole - whole.mean(-1, keepdim=True) if self.is_centred else whole).square()
        ways: Mapping[str, Callable[[], Tensor]] = {
            "over-tokens": lambda: square.mean((0, 1), keepdim=True),
            "over-positions": lambda: square.mean(1, keepdim=True),
            "over-rows": lambda: square.mean(0, keepdim=True),
            "over-all": lambda: square.mean().expand_as(square),
            "of-position": lambda: square.mean(-1, keepdim=True).roll(-number, 1),
            "of-row": lambda: square.mean(-1, keepdim=True).roll(-number, 0),
        }
        means = square.mean(-1, keepdim=True)
        found = _share_in_blocks(means, way, number) if way in _OF_BLOCKS else ways[way]()
        return cell.pick_from_call(found.expand(*square.shape[:-1], found.shape[-1]))


def _share_in_blocks(x: Tensor, way: str, size: int) -> Tensor:
    """Return one number for each block of so many positions of x (b, s, ..., 1); not a number in a block cut off."""
    if x.shape[1] % size:
        return x * torch.nan
    blocks = x.view(x.shape[0], -1, size, *x.shape[2:])
    return _OF_BLOCKS[way](blocks).expand_as(blocks).flatten(1, 2)


def _round(x: Tensor, name: str, changes: Mapping[str, Change]) -> Tensor:
    """Return a tensor, rounded to a narrower dtype where a change says so."""
    change = changes.get("rounded")
    if change is None or change.name != name:
        return x
    return x + (x.detach().to(_DTYPES[change.way]).to(x.dtype) - x.detach())
