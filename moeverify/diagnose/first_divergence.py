"""The first divergence: the first module, forward and backward, whose output differs although its input matches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from moeverify.diagnose.cuts import find_cuts
from moeverify.diagnose.rank_readings import AllReadings, Coordinates, RankReadings, error_of
from moeverify.diagnose.slices import scale_rows
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.observation import Direction, End, FirstDivergence
from moeverify.results.trial import Reason, Trial
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading

NAME = "first_divergence"
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

_DISPATCHER = "dispatcher"  # of a block of experts, which calls them and stands beside them
_MOST_AROUND = 4

# Relative errors above which a reading is wrong: a thousand times what reordered sums of a few layers cost. Units of
# rounding are 1.1e-16 and 6e-8. Readings in bfloat16 (4e-3) are not compared: its rounding hides where it began.
READING_BOUNDS = {torch.float64: 1e-9, torch.float32: 3e-4}


@dataclass(frozen=True)
class Origin:
    """The first reading, in the golden's order, that differs; `tensor` has what all ranks read.

    `input` is what one device read at the input of the same module, forward. `also` names the modules that read the
    same values at the same time: a gradient that a module gets for its output is what those that use it pass back.
    `around` is the module that calls this one, `inside` has those in the culprit of which everything read is right.
    Of `num_tokens` tokens, or rows, `num_wrong` are wrong. `inputs_seen` says that something which the culprit takes
    was compared and is right; ids, such as those of tokens, never are. `slot` says which tensor of the end it is, and
    `right` has the ends of modules in this direction where all that was read is right.
    """

    direction: Direction
    module: str
    end: End
    error: float
    ranks: tuple[int, ...]
    tensor: WrongTensor
    first_micro_batch: int = 0
    input: Tensor | None = None
    also: tuple[str, ...] = ()
    around: str = ""
    inside: tuple[str, ...] = ()
    num_wrong: int = 0
    num_tokens: int = 0
    are_rows: bool = False
    inputs_seen: bool = True
    slot: str = "0"
    right: frozenset[tuple[str, End]] = frozenset()

    @property
    def is_of_culprit(self) -> bool:
        """Return whether the module where it was read is the one that went wrong, and not a module inside of it."""
        return self.end == ("output" if self.direction == FORWARD else "input")

    @property
    def culprit(self) -> str:
        """Return the module whose own computation went wrong, and nothing where that is the whole model.

        A wrong input of a module, with everything before it right, was made by the module around it; a wrong
        gradient of an output came from whoever used that output.
        """
        return self.module if self.is_of_culprit else self.around


@dataclass(frozen=True)
class Search:
    """What came of the search: the origin of each direction, how many readings were right before, how far off.

    `bound` is the relative error above which a reading is wrong; `matched` are the modules whose outputs are right.
    `around` has, by direction, what the modules around an origin or beside it put out next that is wrong too: a
    module may have a part of a sum by right, which is made in the one that calls it. `beside` has what modules beside
    an origin have read wrong at the same end: of what several take, one may be told more of. `golden` has what one
    device read. `cuts` are modules that are not read in which the way back ends.
    """

    origins: Mapping[str, Origin]
    num_right: Mapping[str, int]
    worst_right: Mapping[str, float]
    bound: float
    matched: frozenset[str] = frozenset()
    around: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)
    beside: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)
    golden: Sequence[Reading] = ()
    cuts: frozenset[str] = frozenset()

    def find_cut(self, origin: Origin) -> str:
        """Return the module through which alone an origin gets a gradient, where that is cut, and else nothing."""
        block, _, own = origin.module.rpartition(".")
        is_passed_back = origin.direction == BACKWARD and origin.is_of_culprit and own == _DISPATCHER
        found = sorted(cut for cut in self.cuts if is_passed_back and cut.startswith(f"{block}."))
        return found[0] if len(found) == 1 else ""

    def observe(self, direction: Direction) -> FirstDivergence:
        """Return where a direction first differs, and what was right before."""
        num_right, worst_right = self.num_right[direction], self.worst_right[direction]
        origin = self.origins.get(direction)
        if origin is None:
            return FirstDivergence(direction=direction, num_right=num_right, worst_right=worst_right)
        return FirstDivergence(
            direction=direction,
            module=origin.module,
            end=origin.end,
            error=origin.error,
            ranks=origin.ranks,
            also=origin.also,
            inside=origin.inside,
            num_wrong=origin.num_wrong,
            num_tokens=origin.num_tokens,
            are_rows=origin.are_rows,
            num_right=num_right,
            worst_right=worst_right,
        )


def list_search_trials(search: Search | None) -> tuple[Trial, ...]:
    """Return where the modules' outputs and their gradients first differ, as trials."""
    if search is None:
        return (Trial(hypothesis=NAME, verdict="untried", reason=Reason.MODULES_NOT_COMPARED),)
    found = [search.observe(direction) for direction in DIRECTIONS]
    return tuple(
        Trial(
            hypothesis=NAME,
            about=each.direction,
            verdict="no" if each.error is None else "yes",
            observations=(each,),
        )
        for each in found
    )


@dataclass(frozen=True)
class Known:
    """What the checks have found in the step, apart from its modules.

    `gradients` names the parameters whose gradients are wrong. `noise` is the relative error that calibration allows
    gradients: where a model rounds to a narrower dtype inside, readings that differ by less than it began nothing.
    """

    gradients: Collection[str] = ()
    loss_differs: bool = False
    noise: float = 0.0


def find_origins(
    golden: Sequence[Reading],
    by_rank: Sequence[RankReadings],
    coordinates: Coordinates,
    tp: int,
    precision: torch.dtype,
    known: Known | None = None,
) -> Search:
    """Return the origin of each direction in which anything differs by more than rounding.

    A layout may divide what one module hands to another, as experts over ranks divide the weights of their outputs.
    So what differs and is made good again inside a module around it began nothing.
    """
    known = known or Known()
    bound = max(READING_BOUNDS[precision], known.noise)
    ranks = AllReadings(by_rank, coordinates, tp, precision, golden, bound)
    judged = [
        each
        for reading in sorted(golden, key=lambda reading: reading.order)
        if (each := _judge(reading, ranks, bound)) is not None
    ]
    origins: dict[str, Origin] = {}
    around: dict[str, tuple[Origin, ...]] = {}
    beside: dict[str, tuple[Origin, ...]] = {}
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
            seen, inside = _has_right_input(origin, along), _list_right_inside(origin, along)
            right = _list_right(along)
            origins[direction] = replace(origin, inputs_seen=seen, inside=inside, right=right)
            near = _list_near(first, wrong)
            around[direction] = tuple(_make_origin(each, golden, bound) for each in near)
            others = [each for each in wrong if _is_beside(first, each)][:_MOST_AROUND]
            beside[direction] = tuple(_make_origin(each, golden, bound) for each in others)
    outputs = [each for each in judged if (each.reading.direction, each.reading.end) == (FORWARD, "output")]
    wrong_outputs = {each.reading.module for each in outputs if each.is_wrong}
    matched = frozenset(each.reading.module for each in outputs) - wrong_outputs
    cuts = find_cuts(by_rank, known.gradients)
    return Search(origins, num_right, worst_right, bound, matched, around, beside, golden, cuts)


def _has_right_input(origin: Origin, along: Sequence[_Judged]) -> bool:
    """Return whether what goes into the culprit was compared and is right; of the whole model nothing is."""
    end = "input" if origin.direction == FORWARD else "output"
    return _are_right(
        [each for each in along if (each.reading.module, each.reading.end) == (origin.culprit, end)]
    )


def _list_right_inside(origin: Origin, along: Sequence[_Judged]) -> tuple[str, ...]:
    """Return the outermost modules in the culprit that were read in this direction, and never wrong."""
    inner = f"{origin.culprit}." if origin.is_of_culprit and origin.culprit else ""
    names = dict.fromkeys(
        each.reading.module for each in along if inner and each.reading.module.startswith(inner)
    )
    wrong = {each.reading.module for each in along if each.is_wrong}
    right = [name for name in names if name not in wrong]
    found = [name for name in right if not any(around in right for around in _list_around(name))]
    numbered = {name.rpartition(".")[0] for name in wrong if name.rpartition(".")[2].isdecimal()}
    folded = tuple(dict.fromkeys(_fold_number(name, numbered) for name in found))
    return folded if len(folded) <= _MOST_AROUND else ()


def _list_right(along: Sequence[_Judged]) -> frozenset[tuple[str, End]]:
    """Return the ends of modules where all that was read is right."""
    ends = {(each.reading.module, cast(End, each.reading.end), each.is_wrong) for each in along}
    return frozenset((module, end) for module, end, is_wrong in ends if (module, end, True) not in ends)


def _fold_number(name: str, but: Collection[str]) -> str:
    """Return `experts.*` for `experts.3`, where none of these is wrong."""
    around, _, own = name.rpartition(".")
    return f"{around}.*" if own.isdecimal() and around not in but else name


def _count_wrong(tensor: WrongTensor, bound: float) -> tuple[int, int]:
    """Return how many of the tokens, or rows, that ranks read differ, and how many these are.

    One of small numbers is compared with the norm of a typical one.
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
    """Return the first reading that is wrong, in the order of one device.

    Where modules hand a tensor from one to the other, one device reads it at both, as equal values. A layout may put
    a collective between the two: of these the one that ranks read first is the first. Without one the module that
    made it is named, and not the one that has got it.
    """
    if not wrong:
        return None
    alike = [each for each in wrong if torch.equal(each.reading.local, wrong[0].reading.local)]
    first = min(alike, key=lambda each: each.order)
    # Where ranks have the same at both, nothing lies between them, and the module that made it is known.
    made = [each for each in alike if _is_made_there(each) and _have_same(each.tensor, first.tensor)]
    return first if _is_made_there(first) or not made else min(made, key=lambda each: each.order)


def _list_near(first: _Judged, wrong: Sequence[_Judged]) -> list[_Judged]:
    """Return what modules around the first wrong one, or beside it, made of it next, the innermost first."""
    own = first.reading.module
    modules = {*_list_around(own), f"{own.rpartition('.')[0]}.{_DISPATCHER}"} - {"", own}
    later = wrong[wrong.index(first) + 1 :]
    return [each for each in later if each.reading.module in modules and _is_made_there(each)][:_MOST_AROUND]


def _is_beside(first: _Judged, other: _Judged) -> bool:
    """Return whether another reading is of the same end of a module that the same one calls."""
    one, two = first.reading, other.reading
    is_other = one.module != two.module and one.end == two.end
    return is_other and bool(one.module) and one.module.rpartition(".")[0] == two.module.rpartition(".")[0]


def _is_made_there(judged: _Judged) -> bool:
    """Return whether the module where it was read has made it: its output, or the gradient of its input."""
    reading = judged.reading
    return reading.end == ("output" if reading.direction == FORWARD else "input")


def _have_same(first: WrongTensor, second: WrongTensor) -> bool:
    """Return whether ranks have the same values of two readings, shard by shard."""
    if len(first.shards) != len(second.shards):
        return False
    return all(
        one.region.key == other.region.key and torch.equal(one.values(), other.values())
        for one, other in zip(first.shards, second.shards, strict=True)
    )


@dataclass(frozen=True, eq=False)  # two of them are never equal: `list.index` would compare their tensors
class _Judged:
    """A reading of one device, what all ranks have of it, in which micro-batches, and the worst relative error.

    `order` is the place of the first of these among what its rank read.
    """

    reading: Reading
    tensor: WrongTensor
    micro_batches: Sequence[int]
    order: int
    error: float
    is_wrong: bool


def _judge(reading: Reading, ranks: AllReadings, bound: float) -> _Judged | None:
    """Return a reading as compared; None where it is not comparable on any rank."""
    found = ranks.gather(reading)
    if found is None:
        return None
    tensor, micro_batches, order = found
    error = max(_errors_by_rank(tensor).values())
    if error > bound and reading.is_flat and _has_equal_rows(tensor, bound):
        return None
    return _Judged(reading, tensor, micro_batches, order, error, error > bound)


def _is_summed_up(wrong: _Judged, along: Sequence[_Judged]) -> bool:
    """Return whether a module around what differs, forward, still puts out what it should."""
    module, later = wrong.reading.module, along[along.index(wrong) + 1 :]
    around = {*_list_around(module)} | ({module} if wrong.reading.end == "input" else set())
    return any(
        _are_right([each for each in later if (each.reading.module, each.reading.end) == (name, "output")])
        for name in around
    )


def _is_passed_back(wrong: _Judged, along: Sequence[_Judged], known: Known) -> bool:
    """Return whether a module around a gradient that differs still passes back what it should.

    Its parameters must have right gradients too.
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
    """Yield the modules around one, the whole model `` last."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def _find_caller(module: str, called: Collection[str]) -> str:
    """Return the module that calls one; a list of modules, whose names are numbers, is never called itself."""
    around, _, own = module.rpartition(".")
    return _find_caller(around, called) if own.isdecimal() and around not in called else around


def _make_origin(first: _Judged, golden: Sequence[Reading], bound: float) -> Origin:
    reading, tensor = first.reading, first.tensor
    num_wrong, num_tokens = _count_wrong(tensor, bound)
    return Origin(
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
        _list_equal(golden, reading),
        _find_caller(reading.module, {each.module for each in golden}),
        num_wrong=num_wrong,
        num_tokens=num_tokens,
        are_rows=reading.is_loose,
        slot=reading.slot,
    )


def _list_equal(golden: Sequence[Reading], reading: Reading) -> tuple[str, ...]:
    """Return the other modules at whose ends one device read the same values in the same direction."""
    return tuple(
        dict.fromkeys(
            other.module
            for other in golden
            if (other.direction, other.local.shape) == (reading.direction, reading.local.shape)
            and other.module != reading.module
            and bool(reading.local.any())
            and torch.equal(other.local, reading.local)
        )
    )


def _has_equal_rows(tensor: WrongTensor, bound: float) -> bool:
    """Return whether the ranks together have the golden's tokens in another order.

    A module may sort the tokens that it flattens, by expert say: of the ranks of a layout each sorts its own.
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
    """Return what one device read at the input of the module, forward."""
    return next(
        (
            other.local
            for other in golden
            if (other.direction, other.module, other.end, other.slot)
            == (FORWARD, reading.module, "input", "0")
        ),
        None,
    )
