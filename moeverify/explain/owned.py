"""Parts of sums in which each rank adds the elements that it owns, and no others.

A lookup in rows of a vocabulary, or a choice of targets or experts, that is divided over ranks gives each rank a part
with zeros where other ranks own the elements. If each element of the right sum is the sum of some ranks' parts,
numbers that other ranks add there should be zero. An element that is zero in all parts is missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.chains import is_of_masks, is_passing, list_copied, list_of_step, skip_moves, walk_back
from moeverify.explain.content import TOLERANCE, says_something
from moeverify.explain.counterparts import OneDevice
from moeverify.explain.cuts import Cut, list_batch_cuts, take
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, Joint
from moeverify.explain.meetings import MOVING

_MOST_RANKS = 4
"""Maximum number of ranks whose parts are added in all combinations; of more ranks, single parts are tried."""
_MOST_MOVES = 12
_MOST_SHOWN = 4
_MOST_CHOOSING = 16
_NUM_SAMPLES = 64


def list_owned(alignment: Alignment, one: OneDevice, ops: Sequence[At]) -> Iterator[Edit]:
    """Yield edits that leave out elements of parts which other ranks add to sums, or add missing ones.

    The sums are `ops`, or else those whose results they take. The operators of an edit choose or make the zeros.
    First the masks are changed that they compute, then their results, then the parts.
    """
    joint, wanted = alignment.joint, dict[At, Tensor]()
    made = (joint.maker(skip_moves(joint, at)) for op in ops for at in joint.own_reads(op))
    sums = [op for op in ops if _is_sum(joint, op)] or [op for op in made if _is_sum(joint, op)]
    for members in dict.fromkeys(map(joint.members, sums)):
        wanted |= _find_wanted(alignment, one, members)
    if not wanted:
        return
    shown = (_describe(alignment, wanted),)
    zeroing = {at: _find_zeroing(alignment, at) for at in wanted}
    masks = (
        _list_masks(alignment, joint.maker(zeroing[at]), _find_rows(alignment, at, each))
        for at, each in wanted.items()
    )
    for chosen in zip(*masks, strict=False):
        ops = tuple(dict.fromkeys(joint.maker(at) for at, _ in chosen))
        yield Edit("owned", ops, Changes(values=dict(chosen)), numbers=shown)
    ops = tuple(dict.fromkeys(map(joint.maker, zeroing.values())))
    zeroed = {first: _zero(alignment, at, first, wanted[at]) for at, first in zeroing.items()}
    earlier = {at: data for at, data in zeroed.items() if data is not None}
    if len(earlier) == len(wanted):
        yield Edit("owned", ops, Changes(values=earlier), numbers=shown)
    yield Edit("owned", ops, Changes(values=wanted), numbers=shown)


def _list_masks(alignment: Alignment, op: At, rows: Tensor) -> Iterator[tuple[At, Tensor]]:
    """Yield the masks that an operator takes, with other elements in some rows, nearest first.

    Masks that another mask decides alone are left out, such as its views.
    """
    joint = alignment.joint
    for maker in list_choosing(joint, op):
        taken = [joint.value(at).dtype for at in joint.own_reads(maker)]
        for at in joint.results(maker) if taken != ["bool"] else ():
            data = alignment.data(at)
            if data is not None and data.dtype == torch.bool and data.numel() == rows.numel():
                yield at, data ^ rows.reshape(data.shape)


def list_choosing(joint: Joint, op: At) -> Iterator[At]:
    """Yield the operators of the step that compute the masks and indices which an operator takes, nearest first."""

    def reads(op: At) -> list[At]:
        return [at for at in list_of_step(joint, joint.own_reads(op)) if is_of_masks(joint, at)]

    yield from walk_back(joint, map(joint.maker, reads(op)), reads, _MOST_CHOOSING)


def _find_wanted(alignment: Alignment, one: OneDevice, members: Sequence[At]) -> dict[At, Tensor]:
    """Return the wrong parts of a sum over ranks, with their right elements.

    The parts are followed back through moves to the shape in which one device has the right sum.
    """
    joint = alignment.joint
    if len(members) < 2:
        return {}
    for parts in zip(*(_list_moved(joint, op) for op in members), strict=False):
        data = [each for at in parts if (each := alignment.data(at)) is not None]
        if len(data) < len(parts) or len({each.shape for each in data}) > 1:
            continue
        for right in _list_right(alignment, one, parts[0]):
            wanted = _correct(torch.stack(data), right)
            if wanted is not None:
                pairs = zip(parts, data, wanted, strict=True)
                return {at: each for at, own, each in pairs if not torch.equal(own, each)}
    return {}


def _is_sum(joint: Joint, op: At) -> bool:
    recorded = joint.op(op)
    kind = recorded.name.partition(".")[2]
    return recorded.meeting is not None and kind not in MOVING and len(_list_floating(joint, op)) == 1


def _list_floating(joint: Joint, op: At) -> list[At]:
    """Return the floating-point values that an operator reads; copies of parts of one value count as this value."""
    reads = [at for at in joint.own_reads(op) if joint.value(at).is_floating]
    lines = [list(list_copied(joint, at)) for at in reads] if len(reads) > 1 else []
    common = next((at for at in lines[0] if all(at in line for line in lines)), None) if lines else None
    return reads if common is None else [common]


def _list_moved(joint: Joint, op: At) -> Iterator[At]:
    """Yield the part that a rank adds to a sum, and the values from which it was moved."""
    for _ in range(_MOST_MOVES):
        reads = _list_floating(joint, op)
        if len(reads) != 1:
            return
        yield reads[0]
        op = joint.maker(reads[0])
        if not is_passing(joint, op):
            return


def _list_right(alignment: Alignment, one: OneDevice, part: At) -> Iterator[Tensor]:
    """Yield the single device's values of the step and phase of a part, and of its shape, in program order."""
    joint, program = alignment.joint, one.program
    op, shape = joint.op(joint.maker(part)), joint.value(part).shape
    cuts = list(list_batch_cuts(program, joint.programs[part[0]], alignment.occurrence(part)))
    for value in program.values:
        other = program.ops[value.op]
        if (other.step, other.phase) != (op.step, op.phase) or value.data is None or not value.is_floating:
            continue
        right = _cut(value.data, shape, cuts)
        if right is not None and says_something(right):
            yield right


def _cut(whole: Tensor, shape: tuple[int, ...], cuts: Sequence[Cut]) -> Tensor | None:
    if whole.shape == shape:
        return whole
    return take(whole, shape, cuts) if whole.ndim == len(shape) and whole.numel() > math.prod(shape) else None


def _correct(parts: Tensor, right: Tensor) -> Tensor | None:
    """Return the elements of parts that add up to `right`; None if they do, or if other numbers are wrong.

    Shapes: (ranks, ...), (...). Several ranks own elements: a rank that has the whole sum needs no sum. The first
    rank gets elements that are zero in all parts.
    """
    tolerance = TOLERANCE * float(right.abs().amax())
    some = torch.arange(0, right.numel(), max(1, right.numel() // _NUM_SAMPLES))
    if _choose(parts.reshape(len(parts), -1)[:, some], right.flatten()[some], tolerance) is None:
        return None
    wanted = _choose(parts, right, tolerance)
    owns = [((part - right).abs() <= tolerance) & (part != 0) for part in parts]
    is_whole = any(bool(((part - right).abs() <= tolerance).all()) for part in parts)
    is_right = wanted is None or is_whole or torch.equal(wanted, parts)
    return None if is_right or sum(bool(each.any()) for each in owns) < 2 else wanted


def _choose(parts: Tensor, right: Tensor, tolerance: float) -> Tensor | None:
    """Return parts of which the elements add up to `right`, with zeros elsewhere; None if other numbers are wrong."""
    count = len(parts)
    sizes = range(count, -1, -1) if count <= _MOST_RANKS else (count, 1, 0)
    kept = torch.zeros(parts.shape, dtype=torch.bool)
    is_open = torch.ones(right.shape, dtype=torch.bool)
    for ranks in itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in sizes):
        fits = is_open & ((parts[list(ranks)].sum(0) - right).abs() <= tolerance)
        kept[list(ranks)] |= fits
        is_open &= ~fits
    is_missing = is_open & (parts == 0).all(0)
    wanted = parts.masked_fill(~kept, 0)
    wanted[0] = torch.where(is_missing, right, wanted[0])
    return wanted if torch.equal(is_open, is_missing) else None


def _find_zeroing(alignment: Alignment, at: At) -> At:
    """Return the earlier value of the same shape in which zeros of a part first occur, or where it was computed."""
    joint, data = alignment.joint, alignment.data(at)
    is_zero = None if data is None else data == 0
    while is_zero is not None:
        before = [
            each
            for each in _list_floating(joint, joint.maker(at))
            if joint.value(each).shape == is_zero.shape and joint.op(joint.maker(each)).step >= 0
        ]
        earlier = alignment.data(before[0]) if len(before) == 1 else None
        if earlier is None or not bool((earlier[is_zero] == 0).all()):
            break
        at = before[0]
    return at


def _zero(alignment: Alignment, part: At, earlier: At, wanted: Tensor) -> Tensor | None:
    """Return an earlier value with the zeros that its part should have; None if the part should have fewer."""
    own, data = alignment.data(part), alignment.data(earlier)
    if own is None or data is None or bool((wanted != 0)[own == 0].any()):
        return None
    return data.masked_fill((wanted == 0) & (own != 0), 0)


def _find_rows(alignment: Alignment, part: At, wanted: Tensor) -> Tensor:
    """Return a mask of the rows of a part that differ, along all dims but the last, or of single elements."""
    own = alignment.data(part)
    changed = torch.ones(wanted.shape, dtype=torch.bool) if own is None else own.ne(wanted)
    rows = changed.any(-1) if changed.ndim > 1 else changed
    return rows if changed.ndim > 1 and torch.equal(changed, rows[..., None].expand_as(changed)) else changed


def _describe(alignment: Alignment, wanted: Mapping[At, Tensor]) -> tuple[str, str]:
    """Return the first rank that adds elements of others, or "no rank", and the elements; whole rows as rows."""
    at, right = next(iter(wanted.items()))
    own, rows = alignment.data(at), _find_rows(alignment, at, right)
    is_missing = own is not None and bool((right != 0)[own == 0].any())
    places = rows.flatten().nonzero().flatten().tolist()
    unit = "elements" if rows.shape == right.shape else "rows"
    shown = ", ".join([*map(str, places[:_MOST_SHOWN]), *(["..."] if len(places) > _MOST_SHOWN else [])])
    return "no rank" if is_missing else f"rank {at[0]}", f"{len(places)} of {rows.numel()} {unit} ({shown})"
