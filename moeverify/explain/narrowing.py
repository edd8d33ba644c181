"""Search for values that ranks alone keep in a narrow dtype, by executing the programs with a wide one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeverify.explain.align import Alignment
from moeverify.explain.cause import OperatorCause
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes, Joint, Replacement
from moeverify.explain.operators import is_blank, is_draw, run
from moeverify.explain.program import HIDDEN, Op
from moeverify.explain.suspects import Target, find_targets, measure_target, order_of

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_MOST_PLACES = 12
_LEAST = 1e-11
"""Least relative error of a wrong result. Less may come from another order of float64 additions."""
_LEFT = 1e-3
"""Maximum fraction of a result's error that may be left in the wide dtype."""


def find_narrowing(alignment: Alignment, step: int) -> OperatorCause | None:
    """Return the lines of one function whose narrow dtype makes results of a step wrong, or None."""
    joint = alignment.joint
    places = _list_places(alignment)
    wrong, _ = find_targets(joint, alignment.one, step, _LEAST) if places else ([], [])
    if not wrong:
        return None
    wrong.sort(key=order_of)
    errors = [_measure(joint.data, target) for target in wrong]

    def widen(chosen: Sequence[tuple[At, ...]]) -> tuple[Changes, float] | None:
        """Return the change of some places to a wide dtype and the largest error left; None if results stay wrong."""
        changes = Changes(ops={at: _widen(joint, at) for ops in chosen for at in ops})
        done = joint.execute(changes)
        left = [_measure(done.data, target) for target in wrong]
        is_right = all(new <= max(_LEFT * old, _LEAST) for new, old in zip(left, errors, strict=True))
        return (changes, max(left)) if is_right else None

    kept, repair = places, widen(places)
    if repair is None:
        return None
    for place in places:
        others = [each for each in kept if each is not place]
        if others and (smaller := widen(others)) is not None:
            kept, repair = others, smaller
    functions = {(site.file, site.function) for ops in kept for site in joint.op(ops[0]).sites[:1]}
    if len(functions) > 1:
        return None
    (changes, residual), narrow = repair, joint.value(joint.results(kept[0][0])[0]).dtype
    edit = Edit("dtype", kept[0], changes, numbers=((narrow, "float64"),))
    names = list(dict.fromkeys("/".join(target.mark[1:]) for target in wrong))
    return OperatorCause(list(kept[0]), [edit], wrong[:1], names, residual)


def _measure(data: Callable[[At], Tensor | None], target: Target) -> float:
    return max(measure_target(data(at), target, rank) for rank, at in target.values.items())


def _list_places(alignment: Alignment) -> list[tuple[At, ...]]:
    """Return operators that choose a narrow dtype where one device does not, grouped by line, in program order."""
    joint = alignment.joint
    found: dict[tuple[object, ...], list[At]] = {}
    for rank, program in enumerate(joint.programs):
        for op in program.ops:
            results = [at for at in joint.results((rank, op.number)) if joint.value(at).is_floating]
            is_plain = op.meeting is None and op.short not in HIDDEN and not is_draw(op)
            if not (results and is_plain and _chooses_narrow(op, joint.data(results[0]))):
                continue
            others = [alignment.one.values[each].dtype for each in alignment.list_counterparts(results[0])]
            if joint.value(results[0]).dtype not in others:
                found.setdefault((op.name, program.sites_of(op)[:1]), []).append((rank, op.number))
    return list(map(tuple, found.values()))[:_MOST_PLACES]


def _chooses_narrow(op: Op, data: Tensor | None) -> bool:
    """Return whether an operator makes a value in a narrow dtype that it names, or in the default dtype."""
    named = [each for each in (*op.args, *op.kwargs.values()) if isinstance(each, torch.dtype)]
    return data is not None and data.dtype in _NARROW and (data.dtype in named or not list(op.reads()))


def _widen(joint: Joint, at: At) -> Replacement:
    """Return an operator whose result is float64."""
    op = joint.op(at)
    if is_blank(op):
        return lambda lookup: [lookup(number).double() for number in op.results]

    def widen(argument: Any) -> Any:
        return torch.float64 if isinstance(argument, torch.dtype) and argument in _NARROW else argument

    named = {"dtype": torch.float64} if not list(op.reads()) else {}
    args, kwargs = tuple(map(widen, op.args)), {key: widen(each) for key, each in op.kwargs.items()}
    wide = replace(op, args=args, kwargs=kwargs | named)
    return lambda lookup: run(wide, lookup)
