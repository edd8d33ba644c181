"""Judgement of findings about mutants, by rules that know only the operator and its place.

A rule uses the structure of a finding, never its wording. It uses nothing that the diagnosis derived for
this kind of mutant. If no rule applies, the verdict is `open`, for a person to decide.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from moeverify.cases.axes.groups import list_groups
from moeverify.cases.axes.mesh import MeshPlan
from moeverify.cases.schema import Case
from moeverify.faults.mutation.mutant import Mutant
from moeverify.faults.mutation.operators import OPERATORS
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.finding import Finding
from moeverify.results.mutation import CauseVerdict, MutantJudgement
from moeverify.results.place import Place

_Verdict = tuple[CauseVerdict, str]

_ONLY_A_PLACE = (Cause.FORWARD, Cause.BACKWARD)
_OF_NUMBERS = (Cause.ROUNDING, Cause.PRECISION)
_ARITHMETIC = ("other-denominator", "lost-factor", "lost-term")
_COUNTS = {
    "num_rows": "rows of the batch",
    "num_experts": "experts",
    "top_k": "top_k",
    "weight": "experts",
    "length": "positions of a row",
    "num_valid": "tokens of the batch",
}
_MOVES = (Cause.PERMUTATION, Cause.DUPLICATE, Cause.STALE)
_MOVING = ("reorder", "off-by-one", "chunk-order", "stale", "other-dim")


def judge(mutant: Mutant, case: Case, finding: Finding) -> MutantJudgement:
    """Return whether the first finding of a mutant points at it, and whether its cause is right."""
    verdict, because = _judge_cause(mutant, case, finding)
    located = _locates(mutant, case, finding)
    # A right cause implies a right place.
    if located is not None:
        located = located or verdict == "right"
    return MutantJudgement(located=located, cause=verdict, because=because)


def _judge_cause(mutant: Mutant, case: Case, finding: Finding) -> _Verdict:
    if not finding.is_explained:
        return "none", "no hypothesis explains it"
    cause, terms, axes = finding.code, _list_terms(finding), _list_axes(finding)
    is_fitting = cause in OPERATORS[mutant.operator].causes
    if cause in _OF_NUMBERS:
        is_dtype = mutant.operator == "narrow-dtype"
        return ("right", "it narrows a dtype") if is_dtype else ("wrong", "nothing was rounded")
    if mutant.area.terms and terms and not terms & set(mutant.area.terms):
        return "wrong", f"it is about {', '.join(mutant.area.terms)}, not about {', '.join(sorted(terms))}"
    if axes:
        return _judge_axes(mutant, case, axes, is_fitting=is_fitting)
    if cause in _ONLY_A_PLACE:
        return _judge_place(mutant, finding)
    is_about_it = bool(terms) or _is_stage(mutant, finding) or cause == Cause.DETACHED
    return _judge_kind(mutant, cause, is_about_it=is_about_it and is_fitting)


def _judge_kind(mutant: Mutant, cause: str, *, is_about_it: bool) -> _Verdict:
    is_move = cause in _MOVES and mutant.operator in _MOVING
    if is_about_it or (is_move and cause in OPERATORS[mutant.operator].causes):
        return "right", f"`{cause}` is the effect of {mutant.operator} there"
    return "open", f"no rule says whether `{cause}` is the effect of {mutant.operator} there"


def _judge_axes(mutant: Mutant, case: Case, axes: set[str], *, is_fitting: bool) -> _Verdict:
    groups = {axis: list(map(tuple, each)) for axis, each in list_groups(case).items()}
    if not mutant.area.axes and (mutant.area.terms or mutant.area.stages) and _is_arithmetic(mutant):
        counts = {count for word, count in _COUNTS.items() if word in mutant.before}
        if counts & axes:
            return "right", f"{', '.join(counts & axes)} is among the candidates"
        return "wrong", "no number of ranks is changed there"
    if not mutant.area.axes:
        # The code serves every axis: right if the layout has only one.
        distinct = {tuple(each) for each in groups.values()}
        if len(distinct) > 1:
            return "open", "its code serves every axis, and the layout has several"
        return (
            ("right", "the layout has one axis") if is_fitting else ("open", "another cause on the one axis")
        )
    # If tp shards the experts, etp has no groups of its own among the axes.
    sparse = MeshPlan.of(case.layout).sparse
    own = {axis: list(map(tuple, sparse.groups(axis))) for axis, size in sparse.axes.items() if size > 1}
    meant = {tuple(each[axis]) for each in (groups, own) for axis in mutant.area.axes if axis in each}
    same = {axis for axis, each in groups.items() if tuple(each) in meant} | set(mutant.area.axes)
    if not axes & same:
        return (
            "wrong",
            f"its code is about {', '.join(mutant.area.axes)}, not about {', '.join(sorted(axes))}",
        )
    return ("right", "the axis of its code") if is_fitting else ("open", "another cause on the right axis")


def _is_arithmetic(mutant: Mutant) -> bool:
    """Return whether the mutant changes a number that is not a number of ranks."""
    return mutant.operator in _ARITHMETIC and "size" not in mutant.before


def _judge_place(mutant: Mutant, finding: Finding) -> _Verdict:
    if finding.explanation is None or not mutant.area.modules:
        return "open", "its code serves every module"
    module = finding.explanation.subject.module
    if _is_in(mutant, module) or finding.explanation.subject.quantity is Quantity.LOSS:
        return "place", f"`{module or 'the loss'}` is where its code runs"
    return "wrong", f"its code does not run in `{module}`"


def _locates(mutant: Mutant, case: Case, finding: Finding) -> bool | None:
    area, place = mutant.area, finding.place or Place()
    if not (area.axes or area.modules or area.stages or area.terms):
        return None
    modules = [finding.tensor, place.module]
    if finding.explanation is not None:
        modules += [finding.explanation.subject.module, *finding.explanation.subject.tensors]
    axes = _list_axes(finding)
    return (
        (bool(axes) and bool(area.axes) and _judge_axes(mutant, case, axes, is_fitting=True)[0] == "right")
        or any(_is_in(mutant, module) for module in modules if module)
        or bool(_list_terms(finding) & set(area.terms))
        or _is_stage(mutant, finding)
    )


def _is_in(mutant: Mutant, module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in mutant.area.modules)


def _is_stage(mutant: Mutant, finding: Finding) -> bool:
    return finding.place is not None and finding.place.stage in mutant.area.stages


def _list_axes(finding: Finding) -> set[str]:
    """Return the axes and other sources that a cause names, with all equally good candidates."""
    named = set(finding.place.axes if finding.place is not None else ())
    if finding.explanation is not None:
        named |= {name for product in finding.explanation.candidates for name in product.sources}
    return named


def _list_terms(finding: Finding) -> set[str]:
    parts = finding.place.parts if finding.place is not None else ()
    found = {part.term for part in parts if part.term}
    explanation = finding.explanation
    if explanation is not None and explanation.subject.quantity is Quantity.LOSS:
        found |= {name for name in explanation.subject.tensors if name != "total"}
    return found
