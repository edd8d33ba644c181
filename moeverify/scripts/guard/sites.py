"""The lines of a script that belong to a finding: where a value was drawn, computed, clipped or stepped. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from moeverify.results.checks import CheckName
from moeverify.results.finding import Finding
from moeverify.results.guard import GuardCheck, NonfiniteFacts
from moeverify.results.place import CallSite
from moeverify.results.script import ScriptCheck
from moeverify.scripts.guard.lines import RankHeader, StepRecord

_USED, _BACKWARD, _STEP, _CLIP, _DATA = "module called", "backward", "optimizer step", "clip", "batch drawn"


def add_sites(
    finding: Finding, records: Mapping[int, StepRecord], headers: Mapping[int, RankHeader]
) -> Finding:
    """Return a finding with the call sites that its check is about, the most important one first."""
    record = records.get(finding.rank)
    if record is None or finding.sites:
        return finding
    calls = {call.name: call.site for call in record.calls if call.site}
    clip = next((site for name, site in calls.items() if name.startswith("clip_grad")), "")
    known = {
        _BACKWARD: calls.get("backward", ""),
        _STEP: calls.get("optimizer step", ""),
        _CLIP: clip,
        _DATA: record.data_site,
        _USED: _find_use(finding, headers.get(finding.rank)),
    }
    sites = [CallSite(name=name, site=known[name]) for name in _choose(finding) if known[name]]
    return finding.model_copy(update={"sites": tuple(sites)})


def _choose(finding: Finding) -> tuple[str, ...]:
    if isinstance(finding.facts, NonfiniteFacts) and finding.facts.what == "output":
        return _USED, _DATA
    chosen: Mapping[str, tuple[str, ...]] = {
        GuardCheck.REPLICAS: (_STEP, _BACKWARD, _USED),
        GuardCheck.EXPERTS: (_USED,),
        ScriptCheck.COPIES: (_USED,),
        GuardCheck.TOKENS: (_DATA,),
        GuardCheck.SAME_WORK: (_DATA,),
        GuardCheck.NORM: (_CLIP, _STEP) if _is_of_torch(finding) else (_STEP,),
        GuardCheck.UPDATE: (_STEP, _USED),
        GuardCheck.FINITE: (_BACKWARD, _USED),
        ScriptCheck.PARAMETERS: (_STEP, _USED),
        CheckName.GRADIENT: (_BACKWARD, _USED),
    }
    return chosen.get(finding.check, ())


def _is_of_torch(finding: Finding) -> bool:
    return getattr(finding.facts, "source", "") == "norm"


def _find_use(finding: Finding, header: RankHeader | None) -> str:
    """Return where the script calls the module of a tensor, or the module that the finding names."""
    tensors = () if header is None else header.tensors
    own = (line.site for line in tensors if line.name == finding.tensor and line.site)
    inner = (line.site for line in tensors if line.name.rpartition(".")[0] == finding.tensor and line.site)
    return next(own, "") or next(inner, "")
