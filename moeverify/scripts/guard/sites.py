"""The lines of a script that belong to a finding: where a value was drawn, computed, clipped or stepped. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.checks import CheckName
from moeverify.results.finding import Finding
from moeverify.results.guard import DriftFacts, GuardCheck, NonfiniteFacts
from moeverify.results.script import ScriptCheck
from moeverify.scripts.guard.lines import RankHeader, StepRecord
from moeverify.scripts.record.sites import BACKWARD, CLIP, DATA, STEP, USED, list_sites


def add_sites(
    finding: Finding, records: Mapping[int, StepRecord], headers: Mapping[int, RankHeader]
) -> Finding:
    """Return a finding with the call sites that its check is about, the most important one first."""
    record = records.get(finding.rank)
    if record is None or finding.sites:
        return finding
    used = _find_use(finding, headers.get(finding.rank))
    sites = list_sites(_choose(finding), record.calls, data=record.data_site, used=used)
    return finding.model_copy(update={"sites": sites})


def _choose(finding: Finding) -> tuple[str, ...]:
    if isinstance(finding.facts, NonfiniteFacts) and finding.facts.what == "output":
        return USED, DATA
    if (
        isinstance(finding.facts, DriftFacts)
        and finding.facts.cause is not None
        and finding.facts.cause.module
    ):
        return USED, BACKWARD
    chosen: Mapping[str, tuple[str, ...]] = {
        GuardCheck.REPLICAS: (STEP, BACKWARD, USED),
        GuardCheck.EXPERTS: (USED,),
        ScriptCheck.COPIES: (USED,),
        GuardCheck.TOKENS: (DATA,),
        GuardCheck.SAME_WORK: (DATA,),
        GuardCheck.NORM: (CLIP, STEP) if _is_of_torch(finding) else (STEP,),
        GuardCheck.UPDATE: (STEP, USED),
        GuardCheck.FINITE: (BACKWARD, USED),
        ScriptCheck.PARAMETERS: (STEP, USED),
        CheckName.GRADIENT: (BACKWARD, USED),
    }
    return chosen.get(finding.check, ())


def _is_of_torch(finding: Finding) -> bool:
    return getattr(finding.facts, "source", "") == "norm"


def _find_use(finding: Finding, header: RankHeader | None) -> str:
    """Return where the script calls the module of a tensor, or the module that the finding names."""
    tensors = () if header is None else header.tensors
    own = (line.site for line in tensors if line.name == finding.tensor and line.site)
    cause = finding.facts.cause if isinstance(finding.facts, DriftFacts) else None
    module = cause.module if cause is not None and cause.module else finding.tensor
    inner = (line.site for line in tensors if line.name.rpartition(".")[0] == module and line.site)
    return next(inner, "") or next(own, "")
