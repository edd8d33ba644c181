"""On rank 0: what the causes are of what a load, or a step after it, has wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moeverify.case.schema import Case
from moeverify.checks.base import Judgement
from moeverify.compare.gather import gather_on_first
from moeverify.diagnose.evidence import LIMIT
from moeverify.diagnose.loading import UNKNOWN, LoadedPiece, Saved, name_loaded
from moeverify.golden.store import StoredGolden, tensor_key
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName, Kind
from moeverify.results.finding import Finding

_MOST_NAMED = 400


def conclude_load(
    case: Case,
    golden: StoredGolden,
    held: StoredGolden,
    judgement: Judgement | None,
    loaded: Sequence[tuple[str, Tensor, Region]],
    before: Mapping[str, Tensor],
) -> list[Finding]:
    """Return on rank 0 the findings with their causes. Collective: all ranks."""
    request: list[Any] = [None]
    if judgement is not None:
        examined = (CheckName.LOADED, CheckName.EXPERTS)
        wrong = [finding.tensor for finding in judgement.findings if finding.check in examined]
        request = [list(dict.fromkeys(wrong))[:_MOST_NAMED]]
    dist.broadcast_object_list(request)
    room, pieces = LIMIT, []
    for name, local, region in loaded:
        if name in request[0] and region.numel <= room:
            room -= region.numel
            pieces.append((name, region, local.cpu(), before[name].cpu()))
    gathered = gather_on_first(pieces)
    if judgement is None or gathered is None:
        return []
    by_name: dict[str, list[LoadedPiece]] = {}
    for rank, shown in enumerate(gathered):
        for name, region, local, old in shown:
            by_name.setdefault(name, []).append(LoadedPiece(rank, region, local, old))
    return _name_all(case, golden, held, judgement.findings, by_name)


def _name_all(
    case: Case,
    golden: StoredGolden,
    held: StoredGolden,
    findings: Sequence[Finding],
    by_name: Mapping[str, Sequence[LoadedPiece]],
) -> list[Finding]:
    step = case.checkpoint.after - 1
    saved = Saved(
        read=lambda name: _read(held, step, Kind.LOADED, name),
        earlier=lambda name: _read_earlier(golden, step - 1, name),
        by_shape=_index_shapes(held, step),
        wrong={finding.tensor for finding in findings if finding.check == CheckName.LOADED},
    )
    named: list[Finding] = []
    lost = [finding for finding in findings if finding.check == CheckName.COVERAGE and finding.step == step]
    first = next((f.tensor for f in (*findings, *lost) if f.check == CheckName.LOADED or f in lost), "")
    for finding in [*lost, *(finding for finding in findings if finding not in lost)]:
        if finding in lost:
            sentence = "no rank has it after the load: it was dropped"
            code = Cause.NOT_LOADED.value
            named.append(finding.model_copy(update={"cause": sentence, "code": code}))
            continue
        if finding.check == CheckName.LOADED and finding.tensor in by_name:
            expected = saved.read(finding.tensor)
            if expected is not None:
                named.append(_with_cause(finding, expected, by_name[finding.tensor], saved))
                continue
        follows = "" if finding.check == CheckName.LOADED else first
        named.append(finding.model_copy(update={"follows": follows}))
    return _follow_shifts(named)


def _follow_shifts(findings: Sequence[Finding]) -> list[Finding]:
    """Let what is unknown follow what was read in a wrong place: short pieces lie outside of themselves there."""
    origins: dict[str, str] = {}
    for finding in findings:
        if finding.check == CheckName.LOADED and finding.code == Cause.PERMUTATION.value:
            origins.setdefault(finding.tensor.partition("/")[0], finding.tensor)
    return [
        finding.model_copy(update={"follows": origins.get(finding.tensor.partition("/")[0], "")})
        if finding.check == CheckName.LOADED and finding.cause == UNKNOWN
        else finding
        for finding in findings
    ]


def _with_cause(finding: Finding, expected: Tensor, pieces: Sequence[LoadedPiece], saved: Saved) -> Finding:
    verdict = name_loaded(finding.tensor, expected, pieces, saved)
    return finding.model_copy(
        update={
            "cause": verdict.sentence,
            "code": verdict.cause.value,
            "where": verdict.where or finding.where,
            "evidence": (*finding.evidence, *verdict.evidence),
        }
    )


def _read_earlier(golden: StoredGolden, step: int, name: str) -> Tensor | None:
    """Return what one device had a step before the save."""
    kind, _, rest = name.partition("/")
    kinds = {"weight": "weight", "buffer": "buffer", "optimizer": "optimizer_state"}
    if step < 0 or kind not in kinds:
        return None
    return _read(golden, step, kinds[kind], rest)


def _read(store: StoredGolden, step: int, kind: str, name: str) -> Tensor | None:
    key = tensor_key(kind, name)
    return store.whole(step, key) if key in store.keys(step) else None


def _index_shapes(held: StoredGolden, step: int) -> dict[tuple[int, ...], list[str]]:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for key in held.keys(step):
        by_shape.setdefault(tuple(held.whole(step, key).shape), []).append(key.partition("/")[2])
    return by_shape
