"""Causes of errors after a load, or in a step after it. Rank 0 diagnoses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.cases.schema import Case
from moeverify.explain.fitting.capture import LIMIT
from moeverify.explain.fitting.failure import keep_verdict
from moeverify.explain.fitting.inputs import DiagnosisInputs, Saved
from moeverify.explain.fitting.loading import diagnose_load
from moeverify.explain.fitting.wrong_tensor import Key, RankShard, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.results.finding import Finding
from moeverify.verification.checks.base import Judgement
from moeverify.verification.compare.gather import gather_on_first
from moeverify.verification.golden.store import StoredGolden, tensor_key

_MOST_EXAMINED = 400  # tensors: a load that fails as a whole has thousands of similar wrong tensors


def explain_load(
    case: Case,
    golden: StoredGolden,
    held: StoredGolden,
    judgement: Judgement | None,
    loaded: Sequence[tuple[str, Tensor, Region]],
    before: Mapping[tuple[str, str], Tensor],
) -> list[Finding]:
    """Return on rank 0 the findings with their causes, or without causes if the diagnosis fails.

    `held` is the saved state, `loaded` the tensors after the load, `before` their values before the load.
    Other ranks return an empty list. Collective: all ranks.
    """
    request: list[Any] = [None]
    if judgement is not None:
        wrong = [finding.tensor for finding in judgement.findings if finding.check == CheckName.LOADED]
        request = [list(dict.fromkeys(wrong))[:_MOST_EXAMINED]]
    dist.broadcast_object_list(request)
    room, shards = LIMIT, []
    for name, local, region in loaded:
        if name in request[0] and region.numel <= room:
            room -= region.numel
            shards.append((name, region, local.cpu(), before[name, region.key].cpu()))
    gathered = gather_on_first(shards)
    if judgement is None or gathered is None:
        return []
    by_name: dict[str, list[RankShard]] = {}
    for rank, captured in enumerate(gathered):
        for name, region, local, old in captured:
            by_name.setdefault(name, []).append(RankShard(rank, region, local, old))
    step = case.checkpoint.after - 1
    return keep_verdict(
        judgement.findings,
        lambda: diagnose_load(
            judgement.findings, _gather_inputs(golden, held, step, judgement.findings, by_name), step
        ),
    )


def _gather_inputs(
    golden: StoredGolden,
    held: StoredGolden,
    step: int,
    findings: Sequence[Finding],
    by_name: Mapping[str, Sequence[RankShard]],
) -> DiagnosisInputs:
    """Return the wrong loaded tensors, the saved tensors and the golden's tensors of the step before."""
    tensors: dict[Key, WrongTensor] = {}
    for name, shards in by_name.items():
        expected = _read(held, step, Kind.LOADED, name)
        if expected is not None:
            key = (step, Kind.LOADED, name)
            tensors[key] = WrongTensor(key, expected.to(torch.float64), tuple(shards))
    return DiagnosisInputs(
        tensors=tensors,
        earlier=lambda key: _read_earlier(golden, step - 1, key[2]),
        saved=Saved(
            read=lambda name: _read(held, step, Kind.LOADED, name),
            by_shape=_index_shapes(held, step),
            wrong={finding.tensor for finding in findings if finding.check == CheckName.LOADED},
        ),
    )


def _read_earlier(golden: StoredGolden, step: int, name: str) -> Tensor | None:
    """Return the golden's value of a tensor one step before the save, or None."""
    kind, _, rest = name.partition("/")
    kinds = {"weight": Kind.WEIGHT, "buffer": Kind.BUFFER, "optimizer": Kind.OPTIMIZER_STATE}
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
