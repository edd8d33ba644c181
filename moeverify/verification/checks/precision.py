"""Check that a mixed-precision run computes, reduces and stores in the dtypes of its recipe.

Bounds cannot detect this. Computation in the wide dtype is closer to the golden, and a reduction in the
narrow one adds less error than the computation before it. The ranks report the dtypes that they observe
(`moeverify.verification.checks.dtype_watch`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from moeverify.cases.schema import Case
from moeverify.results.checks import CheckName
from moeverify.results.facts import DtypeFacts, Dtypes, PatternFacts, Use
from moeverify.results.finding import Finding
from moeverify.results.place import Place
from moeverify.train.program import Program, compute_dtype_of, dtype_of
from moeverify.verification.checks.base import Check, Outcome, RankRun, Role, Shown, Watch, make_outcome
from moeverify.verification.checks.dtype_watch import DtypeWatch, Sighting
from moeverify.verification.checks.narrower import name_dtype

WHOLE = "the model"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Wanted:
    """Dtypes of a recipe. Parameters of the modules that `wide` names compute in the stored dtype.

    A pattern of `wide` matches a module and everything in it: `layers.*.norm`.
    """

    compute: str
    kept: str
    wide: Sequence[str] = ()

    @classmethod
    def of_case(cls, case: Case) -> Wanted:
        """Return the dtypes that the case requires."""
        compute, kept = (name_dtype(dtype(case.recipe.precision)) for dtype in (compute_dtype_of, dtype_of))
        return cls(compute, kept, case.layout.in_float32)

    def of(self, sighting: Sighting) -> str:
        """Return the required dtype of a sighting."""
        wide = any(names(pattern, sighting.parameter) for pattern in self.wide)
        return self.compute if sighting.use is Use.COMPUTES and not wide else self.kept


def names(pattern: str, parameter: str) -> bool:
    """Return whether a pattern matches one of the modules around a parameter."""
    parts = parameter.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts)))


class Precision(Check[list[Sighting]]):
    """Dtypes that the ranks observed, against the recipe's dtypes. Only for mixed precision."""

    name = CheckName.PRECISION
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: Program) -> Watch[list[Sighting]] | None:
        """Return a watch of the dtypes of the first step; None without mixed precision; see `Check`."""
        if run.case.recipe.precision != "mixed":
            return None
        return DtypeWatch(program.model, compute_dtype_of(run.case.recipe.precision), run.trace.since)

    def judge(self, shown: Shown, reports: Sequence[list[Sighting]]) -> Outcome | None:
        """Return whether every use had its required dtype; see `Check`."""
        return judge_dtypes(shown, reports, Wanted.of_case(shown.case)) if reports else None


@dataclass(frozen=True)
class _Wrong:
    """One kind of use in one wrong dtype: the sightings by parameter and rank."""

    use: Use
    dtype: str
    wanted: str
    members: Mapping[str, Mapping[int, Sighting]]


def judge_dtypes(shown: Shown, by_rank: Sequence[Sequence[Sighting]], wanted: Wanted) -> Outcome:
    """Return the verdict, with a finding for each largest part of the model in a wrong dtype."""
    places: dict[Use, set[str]] = {}
    wrong: dict[tuple[Use, str, str], dict[str, dict[int, Sighting]]] = {}
    for rank, sightings in enumerate(by_rank):
        for sighting in sightings:
            places.setdefault(sighting.use, set()).add(sighting.parameter)
            if sighting.dtype != wanted.of(sighting):
                by_name = wrong.setdefault((sighting.use, sighting.dtype, wanted.of(sighting)), {})
                by_name.setdefault(sighting.parameter, {})[rank] = sighting
    known: set[str] = set().union(*places.values())
    findings = [
        _make_finding(shown, _Wrong(*how, members), module, len(places[how[0]]), wanted.kept)
        for how, by_name in wrong.items()
        for module, members in join_by_module(by_name, known).items()
    ]
    computing = places.get(Use.COMPUTES, set())
    findings += _find_unmatched(wanted.wide, computing)
    unseen = known - computing
    facts = Dtypes(
        computes=wanted.compute,
        kept=wanted.kept,
        num_parameters=len(known),
        num_unseen=len(unseen),
        first_unseen=min(unseen, default=""),
    )
    return make_outcome(CheckName.PRECISION, findings, sum(map(len, places.values())), facts=facts)


def join_by_module(wrong: Mapping[str, _T], known: Collection[str]) -> dict[str, dict[str, _T]]:
    """Group wrong parameters by the largest module that contains only wrong ones."""
    sound = [name for name in known if name not in wrong]
    joined: dict[str, dict[str, _T]] = {}
    for name, found in wrong.items():
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(len(parts) + 1))
        module = next(place for place in around if not any(_is_in(other, place) for other in sound))
        joined.setdefault(module, {})[name] = found
    return joined


def _is_in(name: str, place: str) -> bool:
    return not place or name == place or name.startswith(f"{place}.")


def _make_finding(shown: Shown, wrong: _Wrong, module: str, num_known: int, kept: str) -> Finding:
    ranks = sorted({rank for by_rank in wrong.members.values() for rank in by_rank})
    how = tuple(
        sorted({each.how for by_rank in wrong.members.values() for each in by_rank.values() if each.how})
    )
    return Finding(
        check=CheckName.PRECISION,
        tensor=module or WHOLE,
        step=0,
        rank=ranks[0],
        ranks=tuple(ranks),
        coordinates=shown.place(ranks[0]),
        error=len(wrong.members) / num_known,
        bound=0.0,
        facts=DtypeFacts(
            use=wrong.use,
            module=module,
            dtype=wrong.dtype,
            wanted=wrong.wanted,
            parameters=tuple(wrong.members),
            num_known=num_known,
            how=how,
            could_declare=bool(module) and wrong.use is Use.COMPUTES and wrong.dtype == kept,
        ),
        place=Place(module=module, ranks=tuple(ranks), collectives=how if wrong.use is Use.REDUCES else ()),
    )


def _find_unmatched(patterns: Sequence[str], computing: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each pattern that matches no module observed to compute."""
    for pattern in patterns:
        if not any(names(pattern, parameter) for parameter in computing):
            yield Finding(
                check=CheckName.PRECISION,
                tensor=pattern,
                step=0,
                rank=0,
                error=1.0,
                bound=0.0,
                facts=PatternFacts(pattern=pattern),
            )


CHECKS = (Precision(),)
