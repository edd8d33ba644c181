"""Counter-tests of a factor that equals the size of an axis: are other gradients there right?

An integer is the size of an axis by chance easily: 2 is also the number of uses of a tied weight. Where the axis is
the cause, what it shards or replicates in the same way is wrong too, or is treated otherwise by the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeverify.diagnose.families import name_family
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.explanation import Explanation, Quantity
from moeverify.results.observation import RightAlike


def count_right_alike(
    explanation: Explanation, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs
) -> Iterator[RightAlike]:
    """Yield, for each axis that a factor of gradients may be, how many others lie on it alike and are right."""
    if any(tensor.quantity is not Quantity.GRADIENT for tensor in tensors):
        return
    wrong = {tensor.name for tensor in inputs.of_quantity(Quantity.GRADIENT)}
    named = dict.fromkeys(axis for product in explanation.candidates for axis in product.sources)
    for axis in named:
        if axis not in inputs.axes.groups:
            continue
        places = {_find_place(tensor.name, axis, inputs) for tensor in tensors}
        alike = [name for name in inputs.regions if _find_place(name, axis, inputs) in places]
        num_right = sum(name not in wrong for name in alike)
        if num_right:
            yield RightAlike(axis=axis, num_right=num_right, num_alike=len(alike))


def _find_place(name: str, axis: str, inputs: DiagnosisInputs) -> tuple[bool, str, frozenset[str]]:
    """Return how a parameter lies on an axis: whether that shards it, what it is, and which axes affect it at all.

    Experts are reduced over other ranks than the router beside them, so what a parameter is tells them apart.
    """
    regions = inputs.regions.get(name, {})
    is_sharded = any(
        len({regions[rank].key for rank in group if rank in regions}) > 1
        for group in inputs.axes.groups[axis]
    )
    return is_sharded, name_family([name]), frozenset(inputs.axes.groups_of(name))
