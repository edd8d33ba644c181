"""Chains of data movement: the views, moves and index computations between an operator and its users."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from moeverify.explain.align import Alignment
from moeverify.explain.content import is_move
from moeverify.explain.joint import At, Joint
from moeverify.explain.meetings import MOVING
from moeverify.explain.program import Ref
from moeverify.explain.sites import is_own

_LONGEST = 64
_MASK_DEPTH = 3
"""Maximum number of operators between a mask and floating-point numbers computed from it."""


def is_copied(joint: Joint, at: At) -> bool:
    """Return whether a value is a view of another one, or consists of elements of others."""
    return joint.value(at).alias >= 0 or is_move(joint.op(joint.maker(at)))


def list_copied(joint: Joint, at: At) -> Iterator[At]:
    """Yield a value, and the values of which it is a copy or view, in whole or in part."""
    yield at
    while is_copied(joint, at) and joint.op(joint.maker(at)).meeting is None:
        sources = joint.own_reads(joint.maker(at))
        if len(sources) != 1:
            return
        at = sources[0]
        yield at


def is_own_op(joint: Joint, op: At) -> bool:
    """Return whether this package calls an operator itself."""
    return all(map(is_own, joint.sites(op)[:1]))


def is_passing(joint: Joint, op: At) -> bool:
    """Return whether an operator only moves elements, or computes only with integers and masks.

    Multiplication by a mask counts as moving the elements that it keeps.
    """
    recorded = joint.op(op)
    if not recorded.results:
        return False
    if recorded.meeting is not None:
        return recorded.name.partition(".")[2] in MOVING
    made = op[0], recorded.results[0]
    if is_copied(joint, made) or not joint.value(made).is_floating:
        return True
    values = [at for at in joint.reads(op) if not is_of_masks(joint, at)]
    return not values if recorded.short.rstrip("_") != "mul" else len(values) < len(list(recorded.reads()))


def may_scale(joint: Joint, op: At) -> bool:
    """Return whether an operator may introduce a factor: it does more than move, or takes integers alone."""
    taken = joint.own_reads(op)
    return not is_passing(joint, op) or (bool(taken) and all(is_of_masks(joint, each) for each in taken))


def is_of_masks(joint: Joint, at: At, depth: int = _MASK_DEPTH) -> bool:
    """Return whether a value is an integer, a mask or a constant, or is computed only from these."""
    if not joint.value(at).is_floating:
        return True
    reads = joint.reads(joint.maker(at))
    is_constant = not reads and not joint.value(at).shape
    return is_constant or (
        depth > 0 and bool(reads) and all(is_of_masks(joint, each, depth - 1) for each in reads)
    )


def multiplies(joint: Joint, op: At) -> bool:
    """Return whether an operator computes each element of its result from an element and a number."""
    recorded = joint.op(op)
    if len(recorded.args) < 2 or not isinstance(recorded.args[0], Ref) or is_move(recorded):
        return False
    taken = joint.value((op[0], recorded.args[0].number))
    own = map(joint.value, joint.results(op))
    is_same = all(each.alias < 0 and each.shape == taken.shape for each in own)
    return is_same and type(recorded.args[1]) in (int, float)


def takes_pair(joint: Joint, op: At) -> bool:
    """Return whether an operator takes several floating-point values of one shape, such as to subtract them."""
    shapes = [joint.value(at).shape for at in joint.own_reads(op) if joint.value(at).is_floating]
    return len(shapes) > len(set(shapes))


def skip_moves(joint: Joint, at: At) -> At:
    """Follow moves back to the value that was computed."""
    while is_passing(joint, joint.maker(at)):
        sources = [each for each in joint.reads(joint.maker(at)) if not is_of_masks(joint, each)]
        if len(sources) != 1:
            break
        at = sources[0]
    return at


def skip_sums(joint: Joint, at: At) -> At:
    """Follow moves and collectives back to the value that the rank itself computed."""
    for _ in range(_LONGEST):
        maker = joint.maker(at)
        sources = joint.own_reads(maker)
        if len(sources) != 1 or not (joint.op(maker).meeting is not None or is_copied(joint, at)):
            break
        at = sources[0]
    return at


def _list_partial(alignment: Alignment, values: Iterable[At]) -> list[At]:
    """Return the values that are parts of sums over ranks."""
    known = [(at, alignment.find(at)) for at in values]
    return [at for at, each in known if each is not None and each.over]


LINEAR = frozenset({"add", "sub", "mul", "div", "neg"})
"""Operators that are linear in one operand, element by element, if their other ones are numbers."""


def find_first_linear(joint: Joint, at: At) -> At:
    """Return the operator of user code that starts the linear computation of a value: its terms are of no such one.

    A rank could take its share of the value there or at any operator after it.
    """

    def reads(op: At) -> list[At]:
        taken = [each for each in joint.own_reads(op) if not is_of_masks(joint, each)]
        name = joint.op(op).short.rstrip("_")
        is_linear = name in LINEAR | {"sum", "mean"} or is_passing(joint, op)
        return taken if is_linear and (name in ("add", "sub") or len(taken) == 1) else []

    linear = [op for op in walk_back(joint, [joint.maker(at)], reads, _LONGEST) if reads(op)]
    starts = [op for op in linear if any(joint.maker(each) not in linear for each in reads(op))]
    made = [op for op in starts or [joint.maker(at)] if joint.op(op).step >= 0 and joint.sites(op)]
    return made[-1] if made else joint.maker(at)


def find_whole(alignment: Alignment, op: At) -> At | None:
    """Return the operator that made the value of one device that each rank adds whole to a collective, or None."""
    joint = alignment.joint
    taken = joint.own_reads(op) if joint.op(op).meeting is not None else []
    known = alignment.find(taken[0]) if len(taken) == 1 else None
    is_whole = known is not None and known.scale == 1.0 and not known.over
    return find_first_linear(joint, taken[0]) if is_whole else None


def list_chain(joint: Joint, values: Sequence[At]) -> list[At]:
    """Return the operators that moved values from where they were computed, the last one first."""

    def passing(ats: Iterable[At]) -> list[At]:
        return [at for at in ats if is_passing(joint, joint.maker(at))]

    def reads(op: At) -> list[At]:
        return passing(joint.own_reads(op))

    return list(walk_back(joint, map(joint.maker, passing(values)), reads, _LONGEST))


def walk_back(
    joint: Joint, ops: Iterable[At], reads: Callable[[At], Iterable[At]], most: int
) -> Iterator[At]:
    """Yield at most `most` operators, breadth first: `ops`, then the makers of the values `reads(op)` of each."""
    found: set[At] = set()
    waiting = deque(ops)
    while waiting and len(found) < most:
        op = waiting.popleft()
        if op not in found:
            found.add(op)
            yield op
            waiting.extend(map(joint.maker, reads(op)))


def list_of_step(joint: Joint, values: Iterable[At]) -> list[At]:
    """Return the values that are made in a step, and not before the first one."""
    return [at for at in values if joint.op(joint.maker(at)).step >= 0]


def list_ancestors(joint: Joint, op: At, depth: int) -> Iterator[At]:
    """Yield the floating-point operands of an operator, and the values that these were moved from."""
    for at in joint.own_reads(op):  # of a collective, not those of other ranks
        if joint.value(at).is_floating:
            yield at
            maker = joint.maker(at)
            if depth and is_passing(joint, maker):
                yield from list_ancestors(joint, maker, depth - 1)


def list_group(alignment: Alignment, op: At, inside: set[At] | None = None) -> tuple[At, ...]:
    """Return the operators of all ranks and micro-batches at one place of the program, within `inside`."""
    joint = alignment.joint
    results = joint.op(op).results
    group = [joint.maker(each) for each in alignment.siblings((op[0], results[0]))] if results else [op]
    return tuple(each for each in group if inside is None or each in inside)


def list_reduced_modules(alignment: Alignment) -> frozenset[str]:
    """Return the modules that compute parts of sums, which a collective then adds up to right values."""
    joint = alignment.joint
    found: set[str] = set()
    for rank, program in enumerate(joint.programs):
        for op in program.ops:
            is_sum = op.meeting is not None and not is_passing(joint, (rank, op.number))
            used = [(rank, each) for each in op.results if joint.users.get((rank, each))]
            if not (is_sum and used) or op.phase != "forward":
                continue
            whole = alignment.find(used[0])
            if whole is None or whole.over or whole.ids is None:
                continue
            parts = _list_partial(alignment, joint.reads((rank, op.number)))
            for maker in walk_back(
                joint,
                map(joint.maker, parts),
                lambda op: _list_partial(alignment, joint.own_reads(op)),
                _LONGEST,
            ):
                found.add(joint.op(maker).module)
    return frozenset(found - {""})
