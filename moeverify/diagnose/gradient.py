"""Names the cause of wrong gradients: families first taken together, then alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moeverify.diagnose.aggregation import examine_aggregation
from moeverify.diagnose.cause import Cause
from moeverify.diagnose.components import ComponentSource
from moeverify.diagnose.evidence import Suspect
from moeverify.diagnose.fit import Wrong
from moeverify.diagnose.places import examine_places
from moeverify.diagnose.replicas import Groups, examine_replica_sums
from moeverify.diagnose.rounding import examine_rounding
from moeverify.diagnose.verdict import Verdict


@dataclass(frozen=True)
class Named:
    """A verdict and the suspects that it explains; without a verdict, suspects that nothing explains."""

    suspects: tuple[Suspect, ...]
    verdict: Verdict | None
    tried: tuple[str, ...] = ()


def family_of(name: str) -> str:
    """Return a parameter's name without its layer, so that the same parameter of all layers is one family."""
    return re.sub(r"\.\d+\.", ".*.", name)


def name_gradient_causes(
    suspects: Sequence[Suspect],
    components: ComponentSource | None,
    groups: Groups,
    degrees: dict[str, int],
) -> list[Named]:
    """Return the causes of wrong gradients of one step, those that explain most first."""
    named: list[Named] = []
    rest: list[Suspect] = []
    for suspect in suspects:
        verdict = _detached(suspect) or examine_replica_sums(suspect, groups)
        if verdict is None:
            rest.append(suspect)
        else:
            named.append(Named((suspect,), verdict))
    if rest and components is not None:
        rest, fitted = _fit(rest, components, degrees)
        named += fitted
    rounded = examine_rounding(rest)
    named += [Named((suspect,), examine_places(suspect) or rounded) for suspect in rest]
    return merge_named(named)


def _as_wrong(suspects: Sequence[Suspect]) -> list[Wrong]:
    return [Wrong(suspect.name, suspect.whole(), suspect.expected) for suspect in suspects]


def _detached(suspect: Suspect) -> Verdict | None:
    if float(suspect.expected.abs().max()) == 0.0:
        return None
    if all(piece.local is None for piece in suspect.pieces):
        return Verdict(Cause.DETACHED, "there is no gradient at all: the parameter is detached from the loss")
    if float(suspect.whole().abs().max()) == 0.0:
        return Verdict(Cause.DETACHED, "the gradient is exactly zero: nothing reaches the parameter")
    return None


def _fit(
    suspects: Sequence[Suspect], source: ComponentSource, degrees: dict[str, int]
) -> tuple[list[Suspect], list[Named]]:
    """Return the suspects that no sum explains, and the causes of the others."""
    components = source()
    known = [suspect for suspect in suspects if suspect.name in components.names]
    foreign = [suspect for suspect in suspects if suspect.name not in components.names]
    verdict, tried = examine_aggregation(_as_wrong(known), components, degrees)
    if verdict is not None and len(known) > 1:
        return foreign, [Named(tuple(known), verdict, tried)]
    named: list[Named] = []
    rest = list(foreign)
    families: dict[str, list[Suspect]] = {}
    for suspect in known:
        families.setdefault(family_of(suspect.name), []).append(suspect)
    for members in families.values():
        verdict, tried = examine_aggregation(_as_wrong(members), components, degrees)
        if verdict is not None:
            named.append(Named(tuple(members), verdict, tried))
            continue
        for suspect in members:
            verdict, tried = examine_aggregation(_as_wrong([suspect]), components, degrees)
            if verdict is None:
                rest.append(suspect)
            else:
                named.append(Named((suspect,), verdict, tried))
    return rest, named


def merge_named(named: Sequence[Named]) -> list[Named]:
    """Return the causes with equal ones joined, those that explain most tensors first, the unexplained last."""
    groups: dict[tuple[str, str], list[Named]] = {}
    for item in named:
        key = (item.verdict.cause.value, item.verdict.sentence) if item.verdict else ("", "")
        groups.setdefault(key, []).append(item)
    joined = [
        Named(
            tuple(suspect for item in items for suspect in item.suspects),
            items[0].verdict,
            items[0].tried,
        )
        for items in groups.values()
    ]
    return sorted(joined, key=lambda item: (item.verdict is None, -len(item.suspects)))
