"""Which initial values were drawn by which other rule, from their values alone: groups of weights, with their rules.

A rule is a distribution and its size, which may depend on each weight's shape. It is found for many weights together:
what fits each of them is tested on all of them at once, and said only where no other rule fits these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeverify.axes.groups import BOTH_FANS, BRANCHES, WEIGHT_COLUMNS, WEIGHT_ROWS
from moeverify.diagnose.distributions import (
    NORMAL,
    SHAPES,
    compare_deviations,
    compare_samples,
    compare_tails,
    find_chance,
    measure_kurtosis,
)
from moeverify.diagnose.weight_sizes import list_sizes
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.initial_values import Draw

HIDDEN = "hidden"
_FEWEST, _FEWEST_TOGETHER = 32, 512
"""Elements of a weight, and of all weights of a group, of which a distribution is said."""

_FEWEST_ALIKE = 2
_LIKELY, _POSSIBLE = 1e-4, 1e-8
"""Chances above which a rule explains a group, and above which it is not excluded."""

_LIKELY_ALONE = 1e-5
_MOST = 1 << 14
"""Elements of a weight that are compared: more tell no more."""

_DEVIATIONS = 6.0
_GAPS = 3.0
"""How much further than the largest value a bound may be, in gaps that are expected of so many values."""

_CHANCE = 0.02
_MOST_DRAWS = 2
_NEAR = 1.0
_MATRIX, _LEAST_ORTHOGONAL = 2, 4


@dataclass(frozen=True)
class Sample:
    """Values of a wrong tensor, at most `_MOST` of `count` with the largest among them, and of its golden there.

    `sizes` are those of the weight and of the model that a rule may ask for; `error` is a unit of the dtype, and
    `deviation` that of the values from zero.
    """

    tensor: WrongTensor
    values: Tensor
    right: Tensor
    count: int
    sizes: Mapping[str, float]
    error: float
    deviation: float


def find_draws(
    tensors: Sequence[WrongTensor], sizes: Mapping[str, float], shapes: Mapping[str, Sequence[int]]
) -> list[tuple[list[WrongTensor], tuple[Draw, ...]]]:
    """Return groups of tensors with what their values are, those that are surely something.

    `sizes` are those of the model, and `shapes` those of all parameters: a bias is drawn by its weight's.
    """
    groups: dict[str, tuple[Draw, list[WrongTensor]]] = {}
    samples = []
    for tensor in tensors:
        if not bool(tensor.whole.isfinite().all()):
            continue
        plain = _find_plain(tensor)
        if plain is not None:
            groups.setdefault(plain.model_dump_json(), (plain, []))[1].append(tensor)
        elif tensor.expected.numel() >= _FEWEST and not _is_correlated(tensor):
            samples.append(_take(tensor, sizes, shapes))
    found: list[tuple[list[WrongTensor], tuple[Draw, ...]]] = []
    found += [(members, (draw,)) for draw, members in groups.values()]
    drawn = _divide(samples)
    # Of what nothing is known of, some weights are near to some rule by chance.
    told, total = (
        sum(each.count for each in of) for of in ([s for group, _ in drawn for s in group], samples)
    )
    return found + [([s.tensor for s in group], draws) for group, draws in drawn if 2 * told > total]


def _divide(samples: Sequence[Sample]) -> list[tuple[list[Sample], tuple[Draw, ...]]]:
    """Return the groups of weights of one rule each, and the rules: those of the most values first."""
    found = []
    left, is_one = list(samples), len(samples) == 1
    while left and (is_one or len(left) > 1):
        draws, group = _find_group(left)
        if not draws:
            break
        found.append((group, draws))
        left = [each for each in left if not any(each is other for other in group)]
    return found


def _find_plain(tensor: WrongTensor) -> Draw | None:
    """Return that all values are one number, or those of an identity or an orthogonal matrix."""
    whole, error = tensor.whole, float(torch.finfo(tensor.precision).eps)
    first = float(whole.reshape(-1)[0])
    if whole.numel() > 1 and bool((whole == first).all()):
        is_drawn = not bool((tensor.expected == tensor.expected.reshape(-1)[0]).all())
        return Draw(distribution="constant", number=first) if is_drawn else None
    if whole.ndim < _MATRIX or min(whole.shape[-2:]) < _LEAST_ORTHOGONAL:
        return None
    eye = torch.eye(*whole.shape[-2:], dtype=torch.float64).expand_as(whole)
    times = float(whole[..., 0, 0].reshape(-1)[0])
    if times and bool((whole == times * eye).all()):
        return Draw(distribution="identity", number=times)
    rows = whole if whole.shape[-2] <= whole.shape[-1] else whole.transpose(-2, -1)
    products = rows @ rows.transpose(-2, -1)
    square = float(products.diagonal(dim1=-2, dim2=-1).mean())
    left = (products - square * torch.eye(products.shape[-1], dtype=torch.float64)).abs().max()
    if square > 0.0 and float(left) <= 4.0 * max(error, 1e-12) * square:
        return Draw(distribution="orthogonal", number=math.sqrt(square))
    return None


def _is_correlated(tensor: WrongTensor) -> bool:
    """Return whether some of the right values are in it, so that they are not drawn otherwise."""
    one, other = (each.reshape(-1) - each.mean() for each in (tensor.whole, tensor.expected))
    cosine = float(one @ other) / max(float(one.norm() * other.norm()), 1e-300)
    return abs(cosine) > _DEVIATIONS / math.sqrt(len(one))


def _take(tensor: WrongTensor, sizes: Mapping[str, float], shapes: Mapping[str, Sequence[int]]) -> Sample:
    values, right = tensor.whole.reshape(-1), tensor.expected.reshape(-1)
    step = max(1, len(values) // _MOST)
    chosen = values[::step].clone()
    chosen[0] = values[values.abs().argmax()]
    own = list_sizes(_find_shape(tensor.name, tuple(tensor.expected.shape), shapes))
    error = float(torch.finfo(tensor.precision).eps)
    deviation = float(chosen.square().mean().sqrt())
    return Sample(tensor, chosen, right[::step], len(values), {**sizes, **own}, error, deviation)


def _find_shape(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the shape by whose sizes a tensor is drawn: that of its weight, where it is a bias."""
    module, _, last = name.rpartition(".")
    if not last.endswith("bias"):
        return shape
    stem = last.removesuffix("bias")
    names = [f"{module}.{stem}{end}" for end in ("weight", "proj")] + [f"{module}.{stem.rstrip('_')}"]
    return next((shapes[each] for each in names if each in shapes), shape)


def _find_group(samples: Sequence[Sample]) -> tuple[tuple[Draw, ...], list[Sample]]:
    """Return what most of the values are, with all weights that it is true of; nothing where that is not sure."""
    choices = []
    for draw in _list_draws(samples):
        fitting = [each for each in samples if _is_near(draw, each) and _test([each], draw) > _LIKELY_ALONE]
        count = sum(each.count for each in fitting)
        # Of some tensors one is near to some rule by chance.
        if count >= _FEWEST_TOGETHER and len(fitting) >= min(len(samples), _FEWEST_ALIKE):
            choices.append((count, draw, fitting))
    # The right one comes first, then rules, then numbers: sorting keeps that order.
    choices.sort(key=lambda each: -each[0])
    for _, draw, fitting in choices:
        # Of a number all of these weights tell more than one.
        if draw.number is None and _test(fitting, draw) <= _LIKELY:
            continue
        known = _choose(fitting)
        if known:
            return known, fitting
    return (), []


def _choose(group: Sequence[Sample]) -> tuple[Draw, ...]:
    """Return the distributions that a group may have, none where there are many."""
    draws = [Draw(distribution="right"), *_list_rules(group), *_list_sized(group)]
    chances = {draw: _test(group, draw) for draw in draws}
    likely = [draw for draw, chance in chances.items() if chance > _LIKELY]
    possible = [draw for draw, chance in chances.items() if chance > _POSSIBLE]
    if likely and likely[0].distribution == "right":
        return (likely[0],)
    rules = [draw for draw in possible if draw.number is None and draw.distribution != "right"]
    if rules and not _is_chance(rules[0], group):
        others = rules
    else:
        others = [draw for draw in possible if draw.number is not None]
    if not set(others) & set(likely) or len({draw.distribution for draw in possible}) > 1:
        return ()
    # Of rules that give the same sizes those of the fewest names are the simplest.
    alike: dict[tuple[object, ...], list[Draw]] = {}
    for draw in others:
        sizes = (round(math.log(_measure(draw, each)), 9) for each in group)
        alike.setdefault((draw.cut, draw.is_after_cut, *sizes), []).append(draw)
    found = [draw for same in alike.values() for draw in same if len(draw.over) == min(map(_count, same))]
    return tuple(found[:_MOST_DRAWS]) if len(alike) <= _MOST_DRAWS else ()


def _count(draw: Draw) -> int:
    return len(draw.over)


def _is_chance(draw: Draw, group: Sequence[Sample]) -> bool:
    """Return whether a rule that gives one size alone is as near to it as some rule is to any size."""
    sizes = [_measure(draw, each) for each in group]
    if max(sizes) > 1.05 * min(sizes):
        return False
    count = sum(each.count for each in group)
    error = 8.0 / count + group[0].error if draw.distribution == "uniform" else 4.0 / math.sqrt(2.0 * count)
    alike = [
        _measure(other, group[0]) for other in _list_rules(group) if other.distribution == draw.distribution
    ]
    near = {round(math.log(each), 6) for each in alike if abs(math.log(each / sizes[0])) <= _NEAR}
    return len(near) * error / _NEAR > _CHANCE


def _test(group: Sequence[Sample], draw: Draw) -> float:
    """Return the chance that all values of a group are so drawn and are as far from it as they are."""
    count = sum(each.count for each in group)
    if draw.distribution == "right":
        return _test_right(group)
    if not all(set(draw.over) <= set(each.sizes) for each in group):
        return 0.0
    sizes = [_measure(draw, each) for each in group]
    shape = SHAPES[draw.distribution, draw.cut, draw.is_after_cut]
    ratios = [each.deviation / (size * shape.deviation) for each, size in zip(group, sizes, strict=True)]
    apart = compare_deviations(ratios, [len(each.values) for each in group], shape.kurtosis)
    units = torch.cat([each.values / size for each, size in zip(group, sizes, strict=True)])
    return min(apart, find_chance(units, shape, count, group[0].error))


def _test_right(group: Sequence[Sample]) -> float:
    """Return the chance that the values are a sample of what the right ones are, by mean and deviation of each."""
    moments = [(float(each.right.mean()), float(each.right.std())) for each in group]
    if not all(spread > 0.0 for _, spread in moments):
        return 0.0  # where the right ones are all the same, no numbers are drawn like them
    ratios = [
        float((each.values - mean).square().mean().sqrt()) / spread
        for each, (mean, spread) in zip(group, moments, strict=True)
    ]
    # Both deviations are measured: of half as many numbers each would be as far off.
    apart = compare_deviations(ratios, [len(each.values) // 2 for each in group], NORMAL)
    one, other = (
        torch.cat([(values - mean) / spread for (mean, spread), values in zip(moments, of_all, strict=True)])
        for of_all in ([each.values for each in group], [each.right for each in group])
    )
    tails = compare_tails(one, measure_kurtosis(other), len(one) / 2.0)
    return min(apart, tails, compare_samples(one, other))


def _is_near(draw: Draw, sample: Sample) -> bool:
    """Return whether a weight's deviation is about that of a distribution, before more is computed."""
    if draw.distribution == "right":
        wanted = float((sample.right - sample.right.mean()).square().mean().sqrt())
        actual = float((sample.values - sample.right.mean()).square().mean().sqrt())
    elif not set(draw.over) <= set(sample.sizes):
        return False
    else:
        deviation = SHAPES[draw.distribution, draw.cut, draw.is_after_cut].deviation
        wanted, actual = deviation * _measure(draw, sample), sample.deviation
    allowed = _DEVIATIONS / math.sqrt(2.0 * len(sample.values)) + sample.error
    return wanted > 0.0 and abs(actual / wanted - 1.0) <= allowed


def _measure(draw: Draw, sample: Sample) -> float:
    """Return the bound, or the deviation, of a weight."""
    if draw.number is not None:
        return draw.number
    product = math.prod(sample.sizes[name] for name in draw.over)
    return math.sqrt(draw.times / product)


def _list_draws(samples: Sequence[Sample]) -> Iterator[Draw]:
    """Yield the right distribution, all rules, and all distributions with the size of the weight of most values."""
    yield Draw(distribution="right")
    yield from _list_rules(samples)
    yield from _list_sized([max(samples, key=lambda each: each.count)])


def _list_sized(samples: Sequence[Sample]) -> Iterator[Draw]:
    """Yield all distributions with the size that all values of these weights have together."""
    count = sum(each.count for each in samples)
    largest = max(float(each.values.abs().max()) for each in samples)
    deviation = math.sqrt(sum(each.count * each.deviation**2 for each in samples) / count)
    for (distribution, cut, is_after), shape in SHAPES.items():
        if is_after:
            continue
        size = deviation / shape.deviation
        if shape.at_bound:  # the largest of so many is nearer to a bound than the deviation to its own
            size = largest / shape.bound * (1.0 + _GAPS / (count * shape.at_bound))
        yield Draw(distribution=distribution, number=size, cut=cut)


def _list_rules(samples: Sequence[Sample]) -> Iterator[Draw]:
    """Yield the distributions whose size is that of a weight's shape, or of the model."""
    known = {name for each in samples for name in each.sizes}
    overs = [(WEIGHT_COLUMNS,), (WEIGHT_ROWS,), (BOTH_FANS,), (WEIGHT_ROWS, WEIGHT_COLUMNS)]
    overs += [(name,) for name in (HIDDEN,) if name in known]
    overs += [(*over, BRANCHES) for over in ((WEIGHT_COLUMNS,), (HIDDEN,)) if BRANCHES in known]
    for distribution, cut, is_after in SHAPES:
        for over in overs:
            if not set(over) <= known:
                continue
            for times in (1.0, 2.0, 3.0, 6.0) if distribution == "uniform" else (1.0, 2.0):
                yield Draw(
                    distribution=distribution,
                    times=times,
                    over=over,
                    cut=cut,
                    is_after_cut=is_after,
                )
