"""Search for a layout of the same recipe that resolves an ambiguous finding. Does not import torch.

Candidates with the same size, such as two axes of 2 ranks, get different sizes in the new layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from moeverify.cases.axes.groups import list_degrees, list_groups
from moeverify.cases.axes.registry import DEGREES
from moeverify.cases.schema import Case, Layout
from moeverify.cases.validation.rules import validate
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation
from moeverify.results.factor import Product
from moeverify.results.finding import Finding, FollowUp
from moeverify.results.operation import Unreduced

_VARIED = sorted((axis for axis in DEGREES if axis.is_varied), key=lambda axis: axis.places_experts)
_DEGREES = (*(axis.degree for axis in _VARIED), "micro_batches")
_SIZES = (1, 2, 3, 4, 6, 8)
# Factors of these causes depend on parts of the batch, which another layout divides differently.
_OF_THE_BATCH = (Cause.SHARE_WEIGHTS, Cause.PADDING)


def suggest_layout(case: Case, finding: Finding, most_ranks: int) -> Finding:
    """Return the finding, with a follow-up layout that separates its candidates if there are several."""
    explanation = finding.explanation
    if explanation is None or finding.follows or len(explanation.candidates) < 2:
        return finding
    if explanation.cause in _OF_THE_BATCH:
        return finding
    # 64 ranks may be allowed but are slow on such a machine.
    limit = min(most_ranks, max(4, 2 * case.layout.world_size))
    candidates = explanation.candidates
    changed = separate(case, candidates, limit, by_ranks=differs_by_groups(explanation))
    if not changed:
        return finding
    axes = tuple(dict.fromkeys(source for product in candidates for source in product.sources))
    return finding.model_copy(
        update={"follow_up": FollowUp(axes=axes, layout=changed, candidates=candidates)}
    )


def differs_by_groups(explanation: Explanation) -> bool:
    """Return whether different rank groups suffice to separate the candidates, as for a missing reduction."""
    return isinstance(explanation.operation, Unreduced)


def separate(case: Case, candidates: Sequence[Product], most_ranks: int, *, by_ranks: bool) -> dict[str, int]:
    """Return the degrees to change so that most candidates differ.

    Return an empty dict if no layout separates any. Among layouts that separate equally many, prefer few
    ranks, then few changes. With `by_ranks` different groups of ranks suffice; otherwise the sizes must
    differ.
    """
    best: tuple[tuple[int, int, int], dict[str, int]] | None = None
    for changed in _list_changes(case.layout, most_ranks):
        other = change_layout(case, changed)
        if other.layout.world_size > most_ranks or validate(other):
            continue
        rank = (-count_apart(other, candidates, by_ranks=by_ranks), other.layout.world_size, len(changed))
        if rank[0] < -1 and (best is None or rank < best[0]):
            best = (rank, changed)
    return best[1] if best is not None else {}


def change_layout(case: Case, changed: dict[str, int]) -> Case:
    """Return the case with other degrees in its layout."""
    return case.model_copy(update={"layout": case.layout.model_copy(update=changed)})


def count_apart(case: Case, candidates: Sequence[Product], *, by_ranks: bool) -> int:
    """Return how many of these candidates differ in the layout of the case.

    Return 0 if a candidate has an axis of size 1 there, on which errors have no effect.
    """
    degrees, groups = list_degrees(case), list_groups(case)
    known = groups if by_ranks else degrees
    if any(source not in known for product in candidates for source in product.sources):
        return 0
    if by_ranks:
        return len({str([groups[source] for source in product.sources]) for product in candidates})
    sizes = {product.measure(degrees) for product in candidates}
    return 0 if 1.0 in sizes else len(sizes)


def _list_changes(layout: Layout, most_ranks: int) -> Iterator[dict[str, int]]:
    """Yield changes of the degrees of a layout; changes of a single degree come first."""
    choices = {
        name: [size for size in _SIZES if size <= most_ranks and size != getattr(layout, name)]
        for name in _DEGREES
    }
    for number in (1, 2, 3):
        for names in itertools.combinations(_DEGREES, number):
            for sizes in itertools.product(*(choices[name] for name in names)):
                yield dict(zip(names, sizes, strict=True))
