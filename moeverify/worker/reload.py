"""On rank 0: the verdict of a load and of the steps after it, and what the causes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.axes.mesh import MeshPlan
from moeverify.case.schema import Case
from moeverify.checks.consistency import judge_coverage, judge_repeat, judge_replicas
from moeverify.checks.identity import Shares, judge_experts, merge_hashes
from moeverify.compare.bounds import Bounds
from moeverify.compare.comparison import Entry
from moeverify.compare.judging import Coordinates, Judgement, Key, assemble, judge
from moeverify.diagnose.capture import LIMIT
from moeverify.diagnose.failure import keep_verdict
from moeverify.diagnose.inputs import STEP_BEFORE, DiagnosisInputs, Saved
from moeverify.diagnose.loading import LOADED, diagnose_load
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.golden.store import StoredGolden, tensor_key
from moeverify.layout.region import Region
from moeverify.results.checks import EXPERTS, RESUMED, UNCOMPARED_KINDS
from moeverify.results.finding import Finding
from moeverify.worker.verify import gather_on_first, replays_routing

_MOST_EXAMINED = 400  # tensors: a load that went wrong as a whole has thousands of the same kind


@dataclass(frozen=True)
class Loaded:
    """What one rank knows: its comparisons, what has other bits than was saved, and after further steps."""

    entries: Sequence[Entry]
    others: Sequence[Key]
    resumed: Sequence[Key] | None
    shares: Shares


def judge_load(case: Case, golden: StoredGolden, held: StoredGolden, by_rank: Sequence[Loaded]) -> Judgement:
    """Return the verdicts: what was loaded, each expert's identity, the further steps, on rank 0."""
    plan = MeshPlan.of(case.layout)
    coordinates: Coordinates = {rank: plan.coordinates(rank) for rank in range(len(by_rank))}
    assembled = assemble([loaded.entries for loaded in by_rank])
    bounds = Bounds(case.checks.tolerance, case.recipe.precision, golden.noise)
    parts = [
        _order_checks(_add_others(judge(assembled, bounds, coordinates), by_rank)),
        judge_experts(held.summary[EXPERTS], merge_hashes([loaded.shares for loaded in by_rank])),
        judge_replicas(assembled, coordinates),
        judge_coverage(assembled, _expected_names(case, golden, held)),
    ]
    if by_rank[0].resumed is not None:
        odd = [(rank, key) for rank, loaded in enumerate(by_rank) for key in loaded.resumed or ()]
        parts.append(_rename(judge_repeat(len(assembled), odd, coordinates)))
    return Judgement(
        tuple(check for part in parts for check in part.checks),
        tuple(finding for part in parts for finding in part.findings),
    )


def _order_checks(judgement: Judgement) -> Judgement:
    """Put what was loaded before the steps that follow from it."""
    checks = sorted(judgement.checks, key=lambda check: check.name != LOADED)
    findings = sorted(judgement.findings, key=lambda finding: finding.check != LOADED)
    return Judgement(tuple(checks), tuple(findings))


def _add_others(judgement: Judgement, by_rank: Sequence[Loaded]) -> Judgement:
    """Add what is equal as a number and yet has other bits: -0.0, another dtype, differences that underflow."""
    known = {finding.tensor for finding in judgement.findings if finding.check == LOADED}
    added: dict[str, Finding] = {}
    for rank, loaded in enumerate(by_rank):
        for step, _, name in loaded.others:
            if name not in known and name not in added:
                evidence = ("the values are equal as numbers, their bits or their type are not",)
                added[name] = Finding(
                    check=LOADED, tensor=name, step=step, rank=rank, error=0.0, bound=0.0, evidence=evidence
                )
    if not added:
        return judgement
    checks = tuple(
        check.model_copy(update={"verdict": "mismatch"}) if check.name == LOADED else check
        for check in judgement.checks
    )
    return Judgement(checks, (*judgement.findings, *added.values()))


def _rename(repeat: Judgement) -> Judgement:
    """Return the comparison with an uninterrupted run, which is one of bits as that of a repetition is."""
    (check,) = repeat.checks
    note = "against the same layout without a checkpoint, bit for bit"
    findings = tuple(
        finding.model_copy(
            update={
                "check": RESUMED,
                "evidence": tuple(
                    text.partition(":")[0] + f": other bits than {note[8:]}" for text in finding.evidence
                ),
            }
        )
        for finding in repeat.findings
    )
    return Judgement((check.model_copy(update={"name": RESUMED, "note": note}),), findings)


def _expected_names(
    case: Case, golden: StoredGolden, held: StoredGolden
) -> Mapping[int, set[tuple[str, str]]]:
    """Return what must be shown: all that was saved, and the golden's further steps."""
    unshown = UNCOMPARED_KINDS | ({"router_ids"} if replays_routing(case) else set())
    after = case.checkpoint.after
    saved = {tuple(key.split("/", 1)) for key in held.keys(after - 1)}
    names: dict[int, set[tuple[str, str]]] = {
        after - 1: {(kind, name) for kind, name in saved if not name.startswith("rng/")}
    }
    for step in range(after, case.recipe.steps):
        pairs = {(kind, name) for kind, _, name in (key.partition("/") for key in golden.keys(step))}
        names[step] = {pair for pair in pairs if pair[0] not in unshown}
    return names


def explain_load(
    case: Case,
    golden: StoredGolden,
    held: StoredGolden,
    judgement: Judgement | None,
    loaded: Sequence[tuple[str, Tensor, Region]],
    before: Mapping[str, Tensor],
) -> list[Finding]:
    """Return on rank 0 the findings with their causes, and without causes where the diagnosis fails.

    Collective: all ranks.
    """
    request: list[Any] = [None]
    if judgement is not None:
        wrong = [finding.tensor for finding in judgement.findings if finding.check == LOADED]
        request = [list(dict.fromkeys(wrong))[:_MOST_EXAMINED]]
    dist.broadcast_object_list(request)
    room, shards = LIMIT, []
    for name, local, region in loaded:
        if name in request[0] and region.numel <= room:
            room -= region.numel
            shards.append((name, region, local.cpu(), before[name].cpu()))
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
    """Return what was loaded wrong, what was saved, and what was saved a step before."""
    tensors: dict[Key, WrongTensor] = {}
    for name, shards in by_name.items():
        expected = _read(held, step, LOADED, name)
        if expected is not None:
            key = (step, LOADED, name)
            tensors[key] = WrongTensor(key, expected.to(torch.float64), tuple(shards))
    return DiagnosisInputs(
        tensors=tensors,
        earlier=lambda key: {STEP_BEFORE: _read_earlier(golden, step - 1, key[2])},
        saved=Saved(
            read=lambda name: _read(held, step, LOADED, name),
            by_shape=_index_shapes(held, step),
            wrong={finding.tensor for finding in findings if finding.check == LOADED},
        ),
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
