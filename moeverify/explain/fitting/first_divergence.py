"""First divergence: the first module, forward and backward, with matching input and different output."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from moeverify.explain.fitting.rank_readings import AllReadings, Coordinates, RankReadings, error_of
from moeverify.explain.fitting.slices import scale_rows
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.observation import Direction, End, FirstDivergence
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

# Error of a sum, relative to the error of its parts alone: rounding to bfloat16 leaves 0.4 % of an error of 100 %.
_LEFT_OF_PARTS = 2.0**-6

# Largest relative error of a right reading: a thousand times the effect of reordered sums in a few layers.
# Units of rounding are 1.1e-16 and 6e-8. Readings in bfloat16 (4e-3) are not compared: rounding hides where
# an error began.
READING_BOUNDS = {torch.float64: 1e-9, torch.float32: 3e-4}


@dataclass(frozen=True)
class Divergence:
    """First reading that differs, in the golden's order; `tensor` has the readings of all ranks.

    `direction`, `module` and `end` locate the reading. `input` is the golden reading of the module's
    forward input.

    `around` is the calling module.

    `num_wrong` of `num_tokens` tokens are wrong. `inputs_seen` is true if an input of the culprit was
    compared and is right; integer inputs such as token ids are never compared.
    """

    direction: Direction
    module: str
    end: End
    error: float
    ranks: tuple[int, ...]
    tensor: WrongTensor
    first_micro_batch: int = 0
    input: Tensor | None = None
    around: str = ""
    num_wrong: int = 0
    num_tokens: int = 0
    inputs_seen: bool = True

    @property
    def is_of_culprit(self) -> bool:
        """Return whether the culprit is the module that was read, and not a module around it."""
        return self.end == ("output" if self.direction == FORWARD else "input")

    @property
    def culprit(self) -> str:
        """Return the module whose own computation is wrong; empty for the whole model.

        If a module's input is wrong and everything before it is right, the module around it made the input.
        A wrong gradient of an output comes from the users of this output.
        """
        return self.module if self.is_of_culprit else self.around


@dataclass(frozen=True)
class Search:
    """Result of the search: the first divergence of each direction, and the readings that match before it.

    `matched` lists the modules whose outputs are right.
    """

    origins: Mapping[str, Divergence]
    num_right: Mapping[str, int]
    worst_right: Mapping[str, float]
    matched: frozenset[str] = frozenset()

    def observe(self, origin: Divergence) -> FirstDivergence:
        """Return the origin of a direction, and the matching readings before."""
        return FirstDivergence(
            direction=origin.direction,
            module=origin.module,
            end=origin.end,
            error=origin.error,
            ranks=origin.ranks,
            num_wrong=origin.num_wrong,
            num_tokens=origin.num_tokens,
            num_right=self.num_right[origin.direction],
            worst_right=self.worst_right[origin.direction],
        )


@dataclass(frozen=True)
class StepFindings:
    """Findings of the checks in the step, apart from modules.

    `gradients` has the names of the parameters with wrong gradients. `noise` is the relative error that
    calibration allows for gradients: if a model rounds to a narrower dtype internally, smaller differences
    of readings are not an origin. With `has_own_step`, the user's step chooses the scale of its backward passes:
    it may add gradients of all ranks, or average them.
    """

    gradients: Collection[str] = ()
    loss_differs: bool = False
    noise: float = 0.0
    has_own_step: bool = False


def find_origins(
    golden: Sequence[Reading],
    by_rank: Sequence[RankReadings],
    coordinates: Coordinates,
    tp: int,
    precision: torch.dtype,
    known: StepFindings | None = None,
) -> Search:
    """Find the first reading of each direction that differs by more than rounding.

    A layout may split intermediate values, such as the weights of expert outputs over ranks. A difference
    is no origin if an enclosing module later has the right result. `by_rank` has the readings by rank, `tp`
    is the size of tensor parallelism, and `precision` selects the bound.
    """
    known = known or StepFindings()
    bound = max(READING_BOUNDS[precision], known.noise)
    in_order = sorted(golden, key=lambda reading: reading.order)

    def judge_all(read: Sequence[RankReadings]) -> list[_Judged]:
        ranks = AllReadings(read, coordinates, tp, precision)
        return [each for reading in in_order if (each := _judge(reading, ranks, bound)) is not None]

    judged = judge_all(by_rank)
    if known.has_own_step and (scale := _find_scale(judged, bound)) != 1.0:
        judged = judge_all([_divide_gradients(each, scale) for each in by_rank])
    origins: dict[str, Divergence] = {}
    num_right = dict.fromkeys((FORWARD, BACKWARD), 0)
    worst_right = dict.fromkeys((FORWARD, BACKWARD), 0.0)
    for direction in DIRECTIONS:
        along = [each for each in judged if each.reading.direction == direction]
        wrong = [each for each in along if each.is_wrong]
        is_made_good = _is_summed_up if direction == FORWARD else partial(_is_passed_back, known=known)
        began = [each for each in wrong if not is_made_good(each, along)]
        if not began and (direction == BACKWARD or not known.loss_differs):
            wrong = []
        first = _find_first(began or wrong)
        for each in along if first is None else along[: along.index(first)]:
            if not each.is_wrong:
                num_right[direction] += 1
                worst_right[direction] = max(worst_right[direction], each.error)
        if first is not None:
            origin = _make_origin(first, golden, bound)
            origins[direction] = replace(origin, inputs_seen=_has_right_input(origin, along))
    outputs = [each for each in judged if (each.reading.direction, each.reading.end) == (FORWARD, "output")]
    wrong_outputs = {each.reading.module for each in outputs if each.is_wrong}
    matched = frozenset(each.reading.module for each in outputs) - wrong_outputs
    return Search(origins, num_right, worst_right, matched)


def _find_scale(judged: Sequence[_Judged], bound: float) -> float:
    """Return the factor of the first reading of the backward pass, if it is a multiple of the golden's, else 1."""
    first = next((each for each in judged if each.reading.direction == BACKWARD), None)
    if first is None:
        return 1.0
    pairs = [(first.tensor.expected_of(shard), shard.values()) for shard in first.tensor.shards]
    size = sum(float(expected.square().sum()) for expected, _ in pairs)
    scale = sum(float((expected * actual).sum()) for expected, actual in pairs) / (size or 1.0)
    error = max(float((actual - scale * expected).norm()) for expected, actual in pairs)
    return scale if scale != 0.0 and error <= bound * abs(scale) * size**0.5 else 1.0


def _divide_gradients(read: RankReadings, scale: float) -> RankReadings:
    """Return the readings of a rank with those of the backward pass divided by a factor."""
    return replace(
        read,
        readings=[
            replace(each, local=each.local / scale) if each.direction == BACKWARD else each
            for each in read.readings
        ],
    )


def _has_right_input(origin: Divergence, along: Sequence[_Judged]) -> bool:
    """Return whether an input of the culprit was compared and is right.

    The whole model has no compared input.
    """
    end = "input" if origin.direction == FORWARD else "output"
    return _are_right(
        [each for each in along if (each.reading.module, each.reading.end) == (origin.culprit, end)]
    )


def _count_wrong(tensor: WrongTensor, bound: float) -> tuple[int, int]:
    """Return how many of the read tokens or rows differ, and how many were read.

    The error of a small row is compared with the norm of a typical row.
    """
    seen = torch.zeros_like(tensor.expected)
    for shard in tensor.shards:
        shard.region.put(seen, torch.ones(shard.region.local_shape, dtype=seen.dtype))
    expected, actual, is_seen = (
        values.flatten(0, 1).flatten(1) for values in (tensor.expected, tensor.whole, seen)
    )
    is_wrong = ~((is_seen * (actual - expected)).norm(dim=1) <= bound * scale_rows(expected))
    return int(is_wrong.sum()), int(is_seen.any(dim=1).sum())


def _find_first(wrong: Sequence[_Judged]) -> _Judged | None:
    """Return the first wrong reading in the order of the single device.

    If one module hands a tensor to another, the single device has equal readings at both. A layout may put
    a collective between them; then the reading that ranks made first is the origin. Without a collective,
    the origin is the module that made the tensor, not the one that received it.
    """
    if not wrong:
        return None
    alike = [each for each in wrong if torch.equal(each.reading.local, wrong[0].reading.local)]
    first = min(alike, key=lambda each: each.order)
    # If ranks have equal values at both ends, there is no operation between them, and the maker is known.
    made = [each for each in alike if _is_made_there(each) and _have_same(each.tensor, first.tensor)]
    return first if _is_made_there(first) or not made else min(made, key=lambda each: each.order)


def _is_made_there(judged: _Judged) -> bool:
    """Return whether the module made the reading: its output, or the gradient of its input."""
    reading = judged.reading
    return reading.end == ("output" if reading.direction == FORWARD else "input")


def _have_same(first: WrongTensor, second: WrongTensor) -> bool:
    """Return whether the shards of two readings have equal values."""
    if len(first.shards) != len(second.shards):
        return False
    return all(
        one.region.key == other.region.key and torch.equal(one.values(), other.values())
        for one, other in zip(first.shards, second.shards, strict=True)
    )


@dataclass(frozen=True, eq=False)  # never compare by value: `list.index` would compare tensors
class _Judged:
    """Golden reading with the readings of all ranks, their micro-batches and the worst relative error.

    `order` is the smallest position of these readings in the sequence of their ranks.
    """

    reading: Reading
    tensor: WrongTensor
    micro_batches: Sequence[int]
    order: int
    error: float
    is_wrong: bool


def _judge(reading: Reading, ranks: AllReadings, bound: float) -> _Judged | None:
    """Compare a golden reading with the ranks; None if no rank has a comparable reading."""
    found = ranks.gather(reading)
    if found is None:
        return None
    tensor, micro_batches, order = found
    error = max(_errors_by_rank(tensor).values())
    if error > bound and reading.is_flat and _has_equal_rows(tensor, bound):
        return None
    return _Judged(reading, tensor, micro_batches, order, error, error > bound)


def _is_summed_up(wrong: _Judged, along: Sequence[_Judged]) -> bool:
    """Return whether a module around a wrong forward reading still has the right output.

    If it hands on the same tensor, its output may be off by the rounding of a sum of the parts: then the sum is
    the origin, and not the parts.
    """
    module, later = wrong.reading.module, along[along.index(wrong) + 1 :]
    around = {*_list_around(module)} | ({module} if wrong.reading.end == "input" else set())
    outputs = [
        [each for each in later if (each.reading.module, each.reading.end) == (name, "output")]
        for name in around
    ]
    return any(_are_right(each) or any(_is_sum_of(wrong, one) for one in each) for each in outputs)


def _is_sum_of(wrong: _Judged, output: _Judged) -> bool:
    """Return whether an output has the values of an inner reading on one device, and nearly so on the ranks."""
    is_same = torch.equal(wrong.reading.local, output.reading.local)
    return is_same and output.error <= _LEFT_OF_PARTS * wrong.error


def _is_passed_back(wrong: _Judged, along: Sequence[_Judged], known: StepFindings) -> bool:
    """Return whether a module around a wrong gradient still passes back the right gradient.

    Its parameters must have right gradients, too.
    """
    module, later = wrong.reading.module, along[along.index(wrong) + 1 :]
    around = {*_list_around(module)} | ({module} if wrong.reading.end == "output" else set())
    return any(
        _are_right([each for each in later if (each.reading.module, each.reading.end) == (name, "input")])
        and not any(parameter.startswith(f"{name}." if name else "") for parameter in known.gradients)
        for name in around
    )


def _are_right(readings: Sequence[_Judged]) -> bool:
    return bool(readings) and not any(each.is_wrong for each in readings)


def _list_around(module: str) -> Iterator[str]:
    """Yield the enclosing modules; the last one is the whole model, named by an empty string."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def _find_caller(module: str, called: Collection[str]) -> str:
    """Return the module that calls a module.

    Module lists, whose children have numbers as names, are never called.
    """
    around, _, own = module.rpartition(".")
    return _find_caller(around, called) if own.isdecimal() and around not in called else around


def _make_origin(first: _Judged, golden: Sequence[Reading], bound: float) -> Divergence:
    reading, tensor = first.reading, first.tensor
    num_wrong, num_tokens = _count_wrong(tensor, bound)
    return Divergence(
        cast(Direction, reading.direction),
        reading.module,
        cast(End, reading.end),
        first.error,
        tuple(sorted(rank for rank, error in _errors_by_rank(tensor).items() if error > bound)),
        tensor,
        min(
            micro_batch
            for shard, micro_batch in zip(tensor.shards, first.micro_batches, strict=True)
            if error_of(shard, tensor.expected) > bound
        ),
        _input_of(golden, reading),
        _find_caller(reading.module, {each.module for each in golden}),
        num_wrong=num_wrong,
        num_tokens=num_tokens,
    )


def _has_equal_rows(tensor: WrongTensor, bound: float) -> bool:
    """Return whether all ranks together have the golden's tokens in another order.

    A module may sort its flattened tokens, for example by expert. Under a layout, each rank sorts its own
    tokens.
    """
    expected, actual = (values.flatten(0, 1) for values in (tensor.expected, tensor.whole))
    weights = torch.linspace(1.0, 2.0, expected.shape[1], dtype=expected.dtype)
    wanted, found = (torch.sort(values @ weights).values for values in (expected, actual))
    return float((found - wanted).norm()) <= bound * float(wanted.norm())


def _errors_by_rank(tensor: WrongTensor) -> dict[int, float]:
    """Return the largest relative error of each rank over its micro-batches."""
    errors: dict[int, float] = {}
    for shard in tensor.shards:
        errors[shard.rank] = max(errors.get(shard.rank, 0.0), error_of(shard, tensor.expected))
    return errors


def _input_of(golden: Sequence[Reading], reading: Reading) -> Tensor | None:
    """Return the golden's first forward input of a module."""
    end = (FORWARD, reading.module, "input", "0")
    return next(
        (each.local for each in golden if (each.direction, each.module, each.end, each.slot) == end), None
    )
