"""Names the cause of wrong gradients: families first taken together, then alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moeverify.diagnose.aggregation import examine_aggregation
from moeverify.diagnose.axes import Axes
from moeverify.diagnose.components import Components, ComponentSource
from moeverify.diagnose.evidence import Key, Suspect, is_value
from moeverify.diagnose.fit import Wrong
from moeverify.diagnose.permutation import examine_places
from moeverify.diagnose.replicas import examine_replica_sums
from moeverify.diagnose.rounding import examine_rounding
from moeverify.diagnose.verdict import Verdict
from moeverify.results.cause import Cause
from moeverify.results.finding import Trial


@dataclass(frozen=True)
class Named:
    """A verdict and the suspects that it explains; without a verdict, suspects that nothing explains.

    `fits` are the fits on the golden's parts that were tried. `subject` is what was examined where that is not
    the first of the suspects: what a module put out.
    """

    suspects: tuple[Suspect, ...]
    verdict: Verdict | None
    fits: tuple[Trial, ...] = ()
    subject: Suspect | None = None


def family_of(name: str) -> str:
    """Return a parameter's name without its layer, so that the same parameter of all layers is one family."""
    return re.sub(r"\.\d+\.", ".*.", name)


def name_gradient_causes(
    suspects: Sequence[Suspect],
    components: ComponentSource | None,
    axes: Axes,
    previous: Callable[[Key], Tensor | None] = lambda key: None,
) -> list[Named]:
    """Return the causes of wrong gradients of one step, those that explain most first.

    `previous` gives the golden's gradient of the step before.
    """
    named: list[Named] = []
    rest: list[Suspect] = []
    for suspect in suspects:
        verdict = _detached(suspect) or examine_replica_sums(suspect, axes.groups_of(suspect.name))
        if verdict is None:
            rest.append(suspect)
        else:
            named.append(Named((suspect,), verdict))
    left, fitted = _fit(rest, components, axes) if rest else ([], [])
    rounded = examine_rounding([item.suspects[0] for item in left])
    for item in left:
        suspect = item.suspects[0]
        verdict = _stale(suspect, previous(suspect.key)) or examine_places(suspect) or rounded
        named.append(replace(item, verdict=verdict))
    return merge_named(named + fitted)


def _examine(
    suspects: Sequence[Suspect], components: Components | None, axes: Axes
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    wrong = [Wrong(suspect.name, suspect.whole(), suspect.expected) for suspect in suspects]
    return examine_aggregation(wrong, components, axes.degrees_of(*(suspect.name for suspect in suspects)))


def _detached(suspect: Suspect) -> Verdict | None:
    if float(suspect.expected.abs().max()) == 0.0:
        return None
    if all(piece.local is None for piece in suspect.pieces):
        return Verdict(Cause.DETACHED, "there is no gradient at all: the parameter is detached from the loss")
    if float(suspect.whole().abs().max()) == 0.0:
        return Verdict(Cause.DETACHED, "the gradient is exactly zero: nothing reaches the parameter")
    return None


def _stale(suspect: Suspect, previous: Tensor | None) -> Verdict | None:
    if previous is None or not is_value(suspect, previous):
        return None
    return Verdict(Cause.STALE, "it is the gradient of the step before: nothing new was accumulated")


def _fit(
    suspects: Sequence[Suspect], source: ComponentSource | None, axes: Axes
) -> tuple[list[Named], list[Named]]:
    """Return the suspects that no sum explains, each alone, and the causes of the others."""
    components = source() if source is not None else None
    known = [suspect for suspect in suspects if components is None or suspect.name in components.names]
    names = {suspect.name for suspect in known}
    rest = [Named((suspect,), None) for suspect in suspects if suspect.name not in names]
    verdict, fits = _examine(known, components, axes) if known else (None, ())
    if verdict is not None and len(known) > 1:
        return rest, [Named(tuple(known), verdict, fits)]
    named: list[Named] = []
    families: dict[str, list[Suspect]] = {}
    for suspect in known:
        families.setdefault(family_of(suspect.name), []).append(suspect)
    for members in families.values():
        verdict, fits = _examine(members, components, axes)
        if verdict is not None:
            named.append(Named(tuple(members), verdict, fits))
            continue
        for suspect in members:
            verdict, fits = _examine([suspect], components, axes)
            (rest if verdict is None else named).append(Named((suspect,), verdict, fits))
    return rest, named


def merge_named(named: Sequence[Named]) -> list[Named]:
    """Return the causes with equal ones joined, those that explain most tensors first, the unexplained last.

    A reduction that is missing for several tensors is one cause, told by the tensor that leaves the fewest axes.
    """
    groups: dict[tuple[str, str], list[Named]] = {}
    for item in named:
        groups.setdefault(_identify(item.verdict), []).append(item)
    joined = []
    for items in groups.values():
        head = min(items, key=lambda item: len(item.verdict.axes) if item.verdict else 0)
        joined.append(replace(head, suspects=tuple(suspect for item in items for suspect in item.suspects)))
    return sorted(joined, key=lambda item: (item.verdict is None, -len(item.suspects)))


def _identify(verdict: Verdict | None) -> tuple[str, str]:
    """Return what is equal for verdicts that say the same."""
    if verdict is None:
        return "", ""
    if verdict.cause is Cause.MISSING_REDUCTION and verdict.axes:
        return verdict.cause.value, verdict.axes[0]
    return verdict.cause.value, verdict.sentence
