"""Edits that divide multiples of right values by their factor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeverify.explain.align import Alignment
from moeverify.explain.chains import list_group, multiplies
from moeverify.explain.edit import Edit
from moeverify.explain.joint import At, Changes
from moeverify.explain.origins import Origins


def list_unscaled(
    alignment: Alignment, unknown: Sequence[At], origins: Origins | None = None
) -> Iterator[Edit]:
    """Yield edits that divide an operand by its factor, if it is a multiple of a value of one device.

    The values of all ranks and micro-batches at one place of the program are divided together. With `origins`, these
    are parts of sums, and an operator multiplies them by another number than on one device.
    """
    seen: set[At] = set()
    inside = set(unknown)
    for op in unknown:
        for at in alignment.joint.reads(op):
            if at in seen or not alignment.joint.value(at).is_floating:
                continue
            group = alignment.siblings(at)
            seen.update(group)
            changes = Changes()
            for each in group:
                known, data = alignment.find(each), alignment.data(each)
                if (
                    known is None
                    or known.ids is None
                    or data is None
                    or bool(known.over) != (origins is not None)
                ):
                    break
                if known.scale != 1.0:
                    changes.values[each] = data / known.scale
            else:
                if changes.values and (origins is None or _is_multiplied(alignment, at, origins)):
                    yield Edit("scale", list_group(alignment, op, inside), changes)


def list_scaled_lines(
    alignment: Alignment, suspects: Sequence[tuple[At, ...]], origins: Origins
) -> Iterator[Edit]:
    """Yield edits that give a line the number that it multiplies by on one device, if suspects take its multiples."""
    seen: set[At] = set()
    for ops in suspects:
        for at in alignment.joint.reads(ops[0]):
            factor, maker = origins.trace_scale(at)
            edit = origins.rescale(maker, factor) if factor != 1.0 and maker not in seen else None
            seen.add(maker)
            if edit is not None:
                yield edit


def _is_multiplied(alignment: Alignment, part: At, origins: Origins) -> bool:
    """Return whether an operator that multiplies by a number has made a part of a sum a multiple."""
    return multiplies(alignment.joint, origins.trace_scale(part, of_parts=True)[1])
