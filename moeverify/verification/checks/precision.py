"""Check the dtypes in which a run computes, reduces and stores, module by module.

Bounds cannot detect a wrong dtype. Computation in the wide dtype is closer to the golden, and a reduction in
the narrow one adds less error than the computation before it. The ranks report the dtypes that they observe
(`moeverify.verification.checks.dtype_watch`).

In mixed precision the recipe states the dtypes of parameters, reductions and stored values. The golden has
the dtypes that one device has in the recipe's precision. In every precision a parameter, gradient, optimizer
state, module output or residual stream that is narrower on a rank than on one device is a mismatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from moeverify.cases.schema import Case, Recipe
from moeverify.results.checks import CheckName
from moeverify.results.facts import DtypeFacts, Dtypes, DtypeUse, NarrowParts, PatternFacts
from moeverify.results.finding import Finding
from moeverify.results.place import Place, Stage
from moeverify.train.program import TrainingProgram, compute_dtype_of, dtype_of
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    make_outcome,
)
from moeverify.verification.checks.dtype_watch import DtypeWatch, Sighting
from moeverify.verification.checks.narrower import dtype_called, is_narrower, name_dtype
from moeverify.verification.golden.noise import narrow_key

WHOLE = "the model"

_T = TypeVar("_T")


# Uses from cause to effect: narrow weights make the outputs, gradients and moments narrow.
_ORDER = (
    DtypeUse.WEIGHT,
    DtypeUse.COMPUTES,
    DtypeUse.RESIDUAL,
    DtypeUse.OUTPUT,
    DtypeUse.OPERATOR,
    DtypeUse.GRADIENT,
    DtypeUse.OPTIMIZER_STATE,
    DtypeUse.REDUCES,
)

_OF_MODULES = (DtypeUse.RESIDUAL, DtypeUse.OUTPUT, DtypeUse.OPERATOR)

OneDevice = Mapping[tuple[str, str, str], str]
"""Dtypes of one device in the recipe's precision, by the key of a sighting."""


@dataclass(frozen=True)
class Wanted:
    """Dtypes of a recipe and of one device.

    In mixed precision (`is_stated`) parameters compute in `compute`, and are kept and reduced in `kept`.
    Parameters of the modules that `wide` names compute in the stored dtype. A pattern of `wide` matches a
    module and everything in it: `layers.*.norm`. Nothing may be narrower than on `one_device`.
    """

    compute: str
    kept: str
    wide: Sequence[str] = ()
    one_device: OneDevice = field(default_factory=dict)
    is_stated: bool = True

    @classmethod
    def of_case(cls, case: Case, one_device: OneDevice) -> Wanted:
        """Return the dtypes that the case requires."""
        precision = case.recipe.precision
        compute, kept = (name_dtype(dtype(precision)) for dtype in (compute_dtype_of, dtype_of))
        return cls(compute, kept, case.layout.in_float32, one_device, precision == "mixed")

    def of(self, sighting: Sighting) -> str:
        """Return the required dtype of a sighting: its own, if nothing is known."""
        if self.is_stated and sighting.use not in _OF_MODULES:
            wide = any(names(pattern, sighting.parameter) for pattern in self.wide)
            return self.compute if sighting.use is DtypeUse.COMPUTES and not wide else self.kept
        known = self.one_device.get(sighting.key)
        if sighting.use is DtypeUse.RESIDUAL and self.one_device and known is None:
            return sighting.how
        if known is not None and is_narrower(dtype_called(sighting.dtype), dtype_called(known)):
            return known
        return sighting.dtype

    def is_wrong(self, sighting: Sighting) -> bool:
        """Return whether a sighting has another dtype than required."""
        return sighting.dtype != self.of(sighting)


def sees_operators(recipe: Recipe) -> bool:
    """Return whether the dtypes of operators are compared: in a user's model without float8."""
    return recipe.model.reference is None and recipe.float8 == "none"


def names(pattern: str, parameter: str) -> bool:
    """Return whether a pattern matches one of the modules around a parameter."""
    parts = parameter.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts)))


class Precision(Check[list[Sighting]]):
    """Dtypes that the ranks observed, against those of the recipe and of one device."""

    name = CheckName.PRECISION
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[list[Sighting]]:
        """Return a watch of the dtypes of the first step; see `Check`."""
        wanted = Wanted.of_case(run.case, run.dtypes)
        compute = compute_dtype_of(run.case.recipe.precision)
        sees = sees_operators(run.case.recipe) and run.case.layout.compile == "none"
        return DtypeWatch(
            program.model,
            compute,
            run.trace.since,
            wanted.is_wrong,
            sees_operators=sees,
            has_own_step=program.custom_step is not None,
        )

    def judge(self, shown: ShownTensors, reports: Sequence[list[Sighting]]) -> CheckOutcome | None:
        """Return whether every use had its required dtype; see `Check`.

        If the recipe states no dtypes and the model has only one, a pass says nothing and is left out.
        """
        if not reports:
            return None
        wanted = Wanted.of_case(shown.case, shown.dtypes)
        outcome = judge_dtypes(shown, reports, wanted)
        if wanted.is_stated:
            return outcome
        parts = _describe_narrow_parts(shown)
        if parts is None and not outcome.findings:
            return None
        return replace(outcome, result=outcome.result.model_copy(update={"facts": parts}))


def _describe_narrow_parts(shown: ShownTensors) -> NarrowParts | None:
    """Return the modules that one device computes below float64, and how many tensors depend on them."""
    found = {name: dtype for (use, name, _), dtype in shown.dtypes.items() if use == DtypeUse.NARROW}
    if not found:
        return None
    depending = [narrow_key(*key) in shown.bounds.noise for key in shown.tensors]
    return NarrowParts(
        dtype=", ".join(sorted(set(found.values()))),
        modules=tuple(sorted(found)),
        num_tensors=sum(depending),
        num_compared=len(depending),
    )


@dataclass(frozen=True)
class _Wrong:
    """One kind of use in one wrong dtype: the sightings by parameter and rank."""

    use: DtypeUse
    dtype: str
    wanted: str
    members: Mapping[str, Mapping[int, Sighting]]


def judge_dtypes(shown: ShownTensors, by_rank: Sequence[Sequence[Sighting]], wanted: Wanted) -> CheckOutcome:
    """Return the verdict, with a finding for each largest part of the model in a wrong dtype."""
    places: dict[DtypeUse, set[str]] = {}
    wrong: dict[tuple[DtypeUse, str, str], dict[str, dict[int, Sighting]]] = {}
    for rank, sightings in enumerate(by_rank):
        for sighting in sightings:
            places.setdefault(sighting.use, set()).add(sighting.parameter)
            if wanted.is_wrong(sighting):
                by_name = wrong.setdefault((sighting.use, sighting.dtype, wanted.of(sighting)), {})
                by_name.setdefault(sighting.parameter, {}).setdefault(rank, sighting)
    known: set[str] = set().union(*(found for use, found in places.items() if use not in _OF_MODULES))
    computing = places.get(DtypeUse.COMPUTES, set())
    findings = [
        _make_finding(shown, _Wrong(*how, members), module, len(places[how[0]]), wanted)
        for how, by_name in sorted(wrong.items(), key=lambda item: _ORDER.index(item[0][0]))
        for module, members in _join(how[0], by_name, known).items()
    ]
    followers = _OF_MODULES if wanted.is_stated else _ORDER
    findings = [_follow(finding, findings, followers) for finding in findings]
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


def _join(use: DtypeUse, wrong: Mapping[str, _T], known: Collection[str]) -> dict[str, dict[str, _T]]:
    """Group wrong parameters by module; wrong outputs and streams by the first one, which makes the others."""
    return {next(iter(wrong)): dict(wrong)} if use in _OF_MODULES else join_by_module(wrong, known)


def _follow(finding: Finding, findings: Sequence[Finding], followers: Collection[DtypeUse]) -> Finding:
    """Return a finding that follows the first one of an earlier use with the same dtype, if there is one."""
    use, dtype = _read(finding)
    causes = [each for each in findings if _ORDER.index(_read(each)[0]) < _ORDER.index(use)]
    first = next((each for each in causes if _read(each)[1] == dtype), None)
    if first is None or use not in followers:
        return finding
    return finding.model_copy(update={"follows": first.tensor})


def _read(finding: Finding) -> tuple[DtypeUse, str]:
    assert isinstance(finding.facts, DtypeFacts)
    return finding.facts.use, finding.facts.dtype


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


def _make_finding(shown: ShownTensors, wrong: _Wrong, module: str, num_known: int, wanted: Wanted) -> Finding:
    seen = [each for by_rank in wrong.members.values() for each in by_rank.values()]
    ranks = tuple(sorted({rank for by_rank in wrong.members.values() for rank in by_rank}))
    is_of_module = wrong.use in _OF_MODULES
    how = () if is_of_module else tuple(sorted({each.how for each in seen if each.how}))
    if wrong.use is DtypeUse.OPERATOR:
        how = (seen[0].how,)
    can_declare = wanted.is_stated and wrong.use is DtypeUse.COMPUTES and wrong.dtype == wanted.kept
    stage = Stage.FORWARD if is_of_module else None
    collectives = how if wrong.use is DtypeUse.REDUCES else ()
    return shown.make_finding(
        CheckName.PRECISION,
        (0, "", module or WHOLE),
        ranks,
        error=len(wrong.members) / num_known,
        facts=DtypeFacts(
            use=wrong.use,
            module=module,
            dtype=wrong.dtype,
            wanted=wrong.wanted,
            parameters=tuple(wrong.members),
            num_known=num_known,
            how=how,
            could_declare=bool(module) and can_declare,
            site=next((each.site for each in seen if each.parameter == module and each.site), ""),
        ),
        place=Place(module=module, ranks=ranks, stage=stage, collectives=collectives),
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
