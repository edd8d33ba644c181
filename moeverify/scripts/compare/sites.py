"""The lines of a watched script that belong to a finding of a comparison."""

from __future__ import annotations

from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.checks import CheckName
from moeverify.results.finding import Finding
from moeverify.results.place import CallSite
from moeverify.results.script import ScriptCheck
from moeverify.scripts.compare.calls import calls_of
from moeverify.scripts.record.read import RankRecord, RecordedRun

_USED, _BACKWARD, _STEP, _CLIP, _DATA = "module called", "backward", "optimizer step", "clip", "batch drawn"
_CHOSEN: dict[str, tuple[str, ...]] = {
    ScriptCheck.BATCH: (_DATA,),
    ScriptCheck.PARAMETERS: (_STEP, _USED),
    ScriptCheck.OPTIONS: (_STEP,),
    ScriptCheck.COPIES: (_USED,),
    CheckName.COVERAGE: (_USED,),
    CheckName.INITIAL_STATE: (_USED,),
    CheckName.ACTIVATIONS: (_USED,),
    CheckName.GRADIENT: (_BACKWARD, _USED),
    CheckName.GRADIENT_NORM: (_CLIP, _STEP),
    CheckName.UPDATE: (_STEP, _USED),
    CheckName.OPTIMIZER_STATE: (_STEP, _USED),
    CheckName.REPLICAS: (_STEP, _USED),
}


def add_sites(run: RecordedRun, finding: Finding) -> Finding:
    """Return a finding with the call sites in a run that its check is about, the most important one first.

    A finding that follows from another one keeps none.
    """
    rank = next((each for each in run.ranks if each.rank == finding.rank), None)
    if rank is None or finding.follows:
        return finding
    calls = {call.name: call.site for call in calls_of(rank, max(finding.step, 0)) if call.site}
    rows = (row.site for row in rank.rows if row.step == finding.step and row.site)
    known = {
        _DATA: next(rows, ""),
        _BACKWARD: calls.get("backward", ""),
        _STEP: calls.get("optimizer step", ""),
        _CLIP: next((site for name, site in calls.items() if name.startswith("clip_grad")), ""),
        _USED: _find_use(rank, finding.tensor),
    }
    chosen = _CHOSEN.get(finding.check, ())
    sites = tuple(CallSite(name=name, site=known[name]) for name in chosen if known[name])
    return finding.model_copy(update={"sites": sites})


def _find_use(rank: RankRecord, tensor: str) -> str:
    """Return where the script calls the module of a parameter, of its moment, or of this name."""
    found = ""
    for (step, kind, name), line in rank.values.items():
        if (step, kind) == (INITIAL, "initial_weight") and line.site:
            if tensor == name or tensor.rpartition(".")[0] == name:
                return line.site
            if name.rpartition(".")[0] == tensor:
                found = found or line.site
    return found
