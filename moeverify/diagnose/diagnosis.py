"""Findings in, cause and place out: what began it comes first, and what follows from it is marked so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moeverify.checks.base import Role
from moeverify.checks.registry import CHECKS, check_of
from moeverify.diagnose.axes import Axes
from moeverify.diagnose.components import ComponentSource
from moeverify.diagnose.evidence import STEP_BEFORE, Key, Suspect
from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.gradient import Named, name_gradient_causes
from moeverify.diagnose.state import (
    name_forward,
    name_initial,
    name_loss,
    name_norm,
    name_routing,
    name_state,
    name_term,
    name_update,
)
from moeverify.diagnose.trials import describe_search, list_trials
from moeverify.diagnose.verdict import Verdict
from moeverify.report.words.check import word_finding
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.finding import Finding, Place, Trial
from moeverify.train.module_taps import BACKWARD, FORWARD

_APART = frozenset(check.name for check in CHECKS if check.role is not Role.DIAGNOSED)
_ORIGINS = frozenset(check.name for check in CHECKS if check.role is Role.ORIGIN)
MOST_EXPLAINED = 20


@dataclass
class Material:
    """Everything that was gathered about a mismatch.

    `search` says where modules first differ, None where that was not asked; `earlier` gives the golden's value of
    a tensor at other times, by what it is called; `issued` the collectives that a rank issued inside a module, in
    words; `num_tokens` the tokens of the batch with padding, `clip` the golden's clip coefficient; `stale` says
    whether the weights of a step earlier explain where the forward pass went wrong, None where that was not asked.
    """

    suspects: Mapping[Key, Suspect] = field(default_factory=dict)
    axes: Axes = field(default_factory=lambda: Axes({}, {}))
    search: Search | None = None
    earlier: Callable[[Key], Mapping[str, Tensor | None]] = lambda key: {}
    issued: Callable[[str, int], tuple[str, ...]] = lambda module, rank: ()
    components: ComponentSource | None = None
    num_tokens: int = 0
    clip: float | None = None
    stale: bool | None = None

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Return where each direction first differs."""
        return self.search.origins if self.search is not None else {}


def origin_step(findings: Sequence[Finding]) -> int | None:
    """Return the first step at which a comparison with the golden failed, None where none did."""
    return min((finding.step for finding in findings if finding.check not in _APART), default=None)


def diagnose(findings: Sequence[Finding], material: Material) -> list[Finding]:
    """Return the findings with causes, the origins first; all others name the origin that they follow."""
    step = origin_step(findings)
    apart = [finding for finding in findings if finding.check in _APART]
    if step is None:
        return [_name_apart(finding) for finding in apart]
    first = [finding for finding in findings if finding.step == step and finding.check not in _APART]
    named = _name(first, step, material)
    origins, explained = _make_origins(named, first, material)
    if not origins:
        return list(findings)
    rest = [finding for finding in findings if _identity(finding) not in explained]
    followers = [
        finding.model_copy(update={"follows": origins[0].tensor})
        for finding in rest
        if finding.check not in _ORIGINS
    ]
    return origins + [_name_apart(f) for f in apart if f.check in _ORIGINS] + followers


def _identity(finding: Finding) -> tuple[str, str, int]:
    return finding.check, finding.tensor, finding.step


def _name(first: Sequence[Finding], step: int, material: Material) -> list[Named]:
    """Return the causes of what failed at the first failing step, by the part of the step that failed first."""
    checks = {finding.check for finding in first}
    suspects = material.suspects
    by_kind: dict[str, list[Suspect]] = {}
    for suspect in suspects.values():
        by_kind.setdefault(suspect.key[1], []).append(suspect)
    if "initial state" in checks:
        return name_initial([*by_kind.get("initial_weight", []), *by_kind.get("initial_buffer", [])])
    if FORWARD in material.origins and material.stale:
        where = material.origins[FORWARD].culprit
        sentence = f"{where} computes with the weights that it had a step earlier: they were not refreshed"
        losses = (*by_kind.get("token_loss", ()), *by_kind.get("loss", ()))
        return [
            Named(losses, Verdict(Cause.STALE, sentence, where), subject=material.origins[FORWARD].suspect)
        ]
    if FORWARD in material.origins:
        return [name_forward(material.origins[FORWARD], material.axes, by_kind)]
    if checks & {"routing", "routing flips", "routing weights"}:
        return name_routing(by_kind, material.num_tokens)
    named = _name_backward(checks, by_kind, material)
    if "buffers" in checks:
        named += name_state(by_kind.get("buffer", []), lambda key: material.earlier(key).get(STEP_BEFORE))
    if not named and CheckName.REPLICAS in checks:
        named += _name_replicas(first)
    return named


def _name_backward(checks: set[str], by_kind: Mapping[str, list[Suspect]], material: Material) -> list[Named]:
    """Return the causes in losses, gradients, and what follows from them, over a right forward pass."""
    if "gradient" in checks:
        gradients = by_kind.get("gradient", [])

        def previous(key: Key) -> Tensor | None:
            return material.earlier(key).get(STEP_BEFORE)

        named = name_gradient_causes(gradients, material.components, material.axes, previous)
        return [_add_place(item, by_kind, material) for item in named]
    if "loss" in checks:
        return name_loss(by_kind, material.axes.degrees, gradient_is_right=True)
    if "gradient norm" in checks:
        return name_norm(by_kind.get("gradient_norm", []), material.axes.degrees)
    if checks & {"update", "optimizer state"}:
        return name_update([*by_kind.get("update", []), *by_kind.get("optimizer_state", [])], material.clip)
    return []


def _add_place(named: Named, by_kind: Mapping[str, list[Suspect]], material: Material) -> Named:
    """Give gradients that no sum explains the loss term, or the module from which on they are wrong."""
    unexplained = named.verdict is None
    rounded = named.verdict is not None and named.verdict.cause is Cause.ROUNDING
    if (unexplained or rounded) and (term := name_term(by_kind)) is not None:
        return replace(named, verdict=term)
    origin = material.origins.get(BACKWARD)
    if origin is None or not (unexplained or rounded):
        return named
    found = name_forward(origin, material.axes, {})
    if named.verdict is not None and found.verdict is not None:
        verdict = Verdict(Cause.ROUNDING, named.verdict.sentence, origin.culprit, found.verdict.evidence)
        return replace(named, verdict=verdict)
    return replace(named, verdict=found.verdict, subject=origin.suspect)


def _name_replicas(first: Sequence[Finding]) -> list[Named]:
    differing = [finding for finding in first if finding.check == CheckName.REPLICAS]
    where = word_finding(differing[0]).where or "ranks " + ", ".join(map(str, differing[0].ranks))
    sentence = f"ranks that should hold the same values do not: {where}"
    return [Named((), Verdict(Cause.REPLICAS, sentence, where))]


def _name_apart(finding: Finding) -> Finding:
    if finding.check == CheckName.REPEAT:
        sentence = "two runs of the same layout differ: something in it is not deterministic"
        return finding.model_copy(update={"cause": sentence, "code": Cause.NONDETERMINISM.value})
    if finding.check == CheckName.SHARDING:
        return finding.model_copy(update={"code": Cause.LAYOUT.value})
    if finding.check == CheckName.PRECISION:
        return finding.model_copy(update={"code": Cause.PRECISION.value})
    return finding


def _make_origins(
    named: Sequence[Named], first: Sequence[Finding], material: Material
) -> tuple[list[Finding], set[tuple[str, str, int]]]:
    """Return one finding for each cause, and the identities of all findings that the causes explain."""
    origins: list[Finding] = []
    explained: set[tuple[str, str, int]] = set()
    for item in named:
        names = {suspect.name for suspect in item.suspects}
        checks = {check_of(suspect.key[1]).name for suspect in item.suspects}
        about = [finding for finding in first if finding.tensor in names]
        members = [finding for finding in about if finding.check in checks] or about
        head = max(members, key=lambda finding: finding.error, default=None)
        if head is None:
            head = first[0]
        if _identity(head) in explained:
            continue
        finding = _with_verdict(head, item, len(names))
        if len(origins) < MOST_EXPLAINED:
            finding = _with_evidence(finding, item, material)
        origins.append(finding)
        explained.add(_identity(head))
    return origins, explained


def _with_verdict(head: Finding, named: Named, num_tensors: int) -> Finding:
    others = f" ({num_tensors} tensors in all)" if num_tensors > 1 else ""
    if named.verdict is None:
        cause = f"no linear combination of the golden's parts explains it{others}"
        tried = [f"{fit.name}: {fit.words}" for fit in named.fits if fit.verdict == "no"]
        tried += _advise_float64(named.suspects)
        return head.model_copy(update={"cause": cause, "evidence": (*head.evidence, *tried)})
    verdict = named.verdict
    return head.model_copy(
        update={
            "cause": verdict.sentence + others,
            "code": verdict.cause.value,
            "where": verdict.where or head.where,
            "evidence": (*head.evidence, *verdict.evidence),
        }
    )


def _advise_float64(suspects: Sequence[Suspect]) -> list[str]:
    """Return what to do where rounding may be all that keeps a cause from being seen."""
    if not suspects or suspects[0].precision == torch.float64:
        return []
    precision = str(suspects[0].precision).removeprefix("torch.")
    return [f"rounding of {precision} hides causes: --set recipe.precision=float64 names them"]


def _with_evidence(finding: Finding, named: Named, material: Material) -> Finding:
    """Return the finding with its place and with all tests of what was examined for it."""
    members = [suspect for suspect in named.suspects if suspect.name == finding.tensor]
    subject = named.subject or next(iter(members or named.suspects), None)
    axes = named.verdict.axes if named.verdict is not None else ()
    module = _find_module(finding, named, material)
    place = Place(
        module=module,
        ranks=finding.ranks or (finding.rank,),
        axes=axes,
        collectives=material.issued(module, finding.rank) if module else (),
    )
    trials: tuple[Trial, ...] = ()
    if subject is not None:
        is_module = subject is named.subject
        earlier = {} if is_module else material.earlier(subject.key)
        stale = material.stale if is_module else None
        trials = list_trials(subject, material.axes, named.fits, earlier, stale)
    return finding.model_copy(update={"place": place, "trials": (*trials, *describe_search(material.search))})


def _find_module(finding: Finding, named: Named, material: Material) -> str:
    """Return the module that a finding is about: where it began, or the one that holds the parameter."""
    if named.subject is not None:
        culprits = [origin for origin in material.origins.values() if origin.suspect is named.subject]
        return culprits[0].culprit if culprits else ""
    holders = ("gradient", "update", "optimizer state", "initial state", "buffers")
    return finding.tensor.rpartition(".")[0] if finding.check in holders else ""
