"""Whether a run in mixed precision computed, reduced and kept in the dtypes of its recipe.

Bounds cannot say it: arithmetic that stayed in the wide dtype is nearer to the golden, and a reduction in the narrow
one adds less than the arithmetic before it. So the ranks say what they saw (`moeverify.checks.dtype_watch`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from moeverify.compare.judging import Coordinates, Judgement
from moeverify.results.checks import PRECISION
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.place import Place

Use = Literal["computes", "reduces", "weight", "gradient", "optimizer state"]

WHOLE = "the model"
_MOST_NAMED = 3
_SENTENCES: Mapping[Use, str] = {
    "computes": "{where} computes with parameters in {dtype} instead of {wanted}",
    "reduces": "the gradients of {where} are reduced in {dtype} instead of {wanted}",
    "weight": "the parameters of {where} are kept in {dtype} instead of {wanted}",
    "gradient": "the gradients of {where} are kept in {dtype} instead of {wanted}",
    "optimizer state": "the optimizer state of {where} is kept in {dtype} instead of {wanted}",
}


@dataclass(frozen=True)
class Seen:
    """The dtype in which a rank was seen to use a parameter; `how` says by which
    collective or of which moment, or nothing.
    """

    use: Use
    parameter: str
    dtype: str
    how: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a recipe asks for; parameters of the modules that `wide` names compute as they are kept.

    A pattern of `wide` is about a module, and everything in it: `layers.*.norm`.
    """

    compute: str
    kept: str
    wide: Sequence[str] = ()

    def of(self, seen: Seen) -> str:
        """Return the dtype in which it should have been."""
        wide = any(names(pattern, seen.parameter) for pattern in self.wide)
        return self.compute if seen.use == "computes" and not wide else self.kept


def names(pattern: str, parameter: str) -> bool:
    """Return whether a pattern names one of the modules around a parameter."""
    parts = parameter.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts)))


def judge_precision(by_rank: Sequence[Sequence[Seen]], wanted: Wanted, coordinates: Coordinates) -> Judgement:
    """Return whether everything was in its dtype, with a finding for each largest part of the model that was not."""
    places: dict[Use, set[str]] = {}
    wrong: dict[tuple[Use, str, str], dict[str, dict[int, Seen]]] = {}
    for rank, sightings in enumerate(by_rank):
        for seen in sightings:
            places.setdefault(seen.use, set()).add(seen.parameter)
            if seen.dtype != wanted.of(seen):
                by_name = wrong.setdefault((seen.use, seen.dtype, wanted.of(seen)), {})
                by_name.setdefault(seen.parameter, {})[rank] = seen
    known: set[str] = set().union(*places.values())
    findings = [
        _make_finding(use, dtype, right, where, members, len(places[use]), wanted.kept, coordinates)
        for (use, dtype, right), by_name in wrong.items()
        for where, members in _join(by_name, known).items()
    ]
    findings += [_miss(pattern) for pattern in wanted.wide if not _is_met(pattern, places)]
    worst = max(findings, key=lambda finding: finding.error, default=None)
    check = CheckResult(
        name=PRECISION,
        verdict="mismatch" if findings else "pass",
        tensors=sum(map(len, places.values())),
        worst=Worst(tensor=worst.tensor, error=worst.error, bound=0.0, step=worst.step) if worst else None,
        unseen=_describe_unseen(known - places.get("computes", set()), len(known)),
        note=f"computes in {wanted.compute}, reduces and keeps in {wanted.kept}",
    )
    return Judgement((check,), tuple(findings))


def _describe_unseen(names: Collection[str], num_known: int) -> str:
    """Return what is not known of parameters whose modules are compiled, or are never called themselves."""
    if not names:
        return ""
    first = min(names)
    return (
        f"{len(names)} of {num_known} parameters, such as {first}, were not seen to compute: "
        "whether they are narrowed, and in what they are reduced, was not verified"
    )


def _join(
    wrong: Mapping[str, Mapping[int, Seen]], known: Collection[str]
) -> dict[str, dict[str, Mapping[int, Seen]]]:
    """Return the wrong parameters by the largest part of the model all of which is wrong."""
    sound = [name for name in known if name not in wrong]
    joined: dict[str, dict[str, Mapping[int, Seen]]] = {}
    for name, by_rank in wrong.items():
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(len(parts) + 1))
        where = next(place for place in around if not any(_is_in(other, place) for other in sound))
        joined.setdefault(where, {})[name] = by_rank
    return joined


def _is_in(name: str, place: str) -> bool:
    return not place or name == place or name.startswith(f"{place}.")


def _make_finding(
    use: Use,
    dtype: str,
    right: str,
    where: str,
    members: Mapping[str, Mapping[int, Seen]],
    num_known: int,
    kept: str,
    coordinates: Coordinates,
) -> Finding:
    ranks = sorted({rank for by_rank in members.values() for rank in by_rank})
    how = sorted({seen.how for by_rank in members.values() for seen in by_rank.values() if seen.how})
    place = where or WHOLE
    told = [f"{'by' if use == 'reduces' else 'its'} {', '.join(how)}"] if how else []
    if where and use == "computes" and dtype == kept:
        told.append(f"if that is meant, declare it by layout.in_float32: [{where}]")
    named = ", ".join(list(members)[:_MOST_NAMED])
    more = f" and {len(members) - _MOST_NAMED} more" if len(members) > _MOST_NAMED else ""
    return Finding(
        check=PRECISION,
        tensor=place,
        step=0,
        rank=ranks[0],
        ranks=tuple(ranks),
        coordinates=dict(coordinates.get(ranks[0], {})),
        error=len(members) / num_known,
        bound=0.0,
        cause=_SENTENCES[use].format(where=place, dtype=dtype, wanted=right),
        evidence=(f"{len(members)} of {num_known} parameters: {named}{more}", *told),
        place=Place(module=where, ranks=tuple(ranks), collectives=tuple(how) if use == "reduces" else ()),
    )


def _is_met(pattern: str, places: Mapping[Use, Collection[str]]) -> bool:
    return any(names(pattern, parameter) for parameter in places.get("computes", ()))


def _miss(pattern: str) -> Finding:
    return Finding(
        check=PRECISION,
        tensor=pattern,
        step=0,
        rank=0,
        error=1.0,
        bound=0.0,
        cause=f"`{pattern}` of layout.in_float32 names no module that was seen to compute",
    )
