"""The lines of a watched script that belong to a finding of a comparison."""

from __future__ import annotations

from moeverify.parallel.regions.observer import INITIAL
from moeverify.results.checks import CheckName
from moeverify.results.finding import Finding
from moeverify.results.script import ScriptCheck
from moeverify.scripts.compare.calls import calls_of
from moeverify.scripts.record.read import RankRecord, RecordedRun
from moeverify.scripts.record.sites import BACKWARD, CLIP, DATA, STEP, USED, list_sites

_CHOSEN: dict[str, tuple[str, ...]] = {
    ScriptCheck.BATCH: (DATA,),
    ScriptCheck.PARAMETERS: (STEP, USED),
    ScriptCheck.OPTIONS: (STEP,),
    ScriptCheck.COPIES: (USED,),
    CheckName.COVERAGE: (USED,),
    CheckName.INITIAL_STATE: (USED,),
    CheckName.ACTIVATIONS: (USED,),
    CheckName.GRADIENT: (BACKWARD, USED),
    CheckName.GRADIENT_NORM: (CLIP, STEP),
    CheckName.UPDATE: (STEP, USED),
    CheckName.OPTIMIZER_STATE: (STEP, USED),
    CheckName.REPLICAS: (STEP, USED),
}


def add_sites(run: RecordedRun, finding: Finding) -> Finding:
    """Return a finding with the call sites in a run that its check is about, the most important one first.

    A finding that follows from another one keeps none.
    """
    rank = next((each for each in run.ranks if each.rank == finding.rank), None)
    if rank is None or finding.follows:
        return finding
    calls = calls_of(rank, max(finding.step, 0))
    drawn = [row.site for row in rank.rows if row.step == finding.step]
    drawn += [line.site for line in rank.drawn if line.step == finding.step]
    chosen, used = _CHOSEN.get(finding.check, ()), _find_use(rank, finding.tensor)
    return finding.model_copy(
        update={"sites": list_sites(chosen, calls, data=next(filter(None, drawn), ""), used=used)}
    )


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
