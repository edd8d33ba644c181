"""On every rank, after a mismatch: run again up to the step where it began, and gather what a diagnosis needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.axes.groups import axis_affects, list_degrees, list_groups, name_ranks
from moeverify.axes.mesh import MeshPlan
from moeverify.case.schema import Case, Recipe
from moeverify.collectives.trace import CollectiveTrace
from moeverify.collectives.words import summarize_records
from moeverify.compare.judging import Judgement
from moeverify.diagnose.axes import Axes
from moeverify.diagnose.components import Components, make_components
from moeverify.diagnose.diagnosis import Material, diagnose, origin_step
from moeverify.diagnose.evidence import (
    INITIAL_VALUE,
    LIMIT,
    STEP_BEFORE,
    Capture,
    Key,
    collect_suspects,
)
from moeverify.diagnose.first_divergence import RankReadings, Search, find_origins
from moeverify.diagnose.stale import explains_stale
from moeverify.golden.store import StoredGolden
from moeverify.layout.observer import INITIAL
from moeverify.layout.region import Region
from moeverify.results.checks import CHECKS, REPLICAS
from moeverify.results.finding import Finding
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.module_taps import FORWARD, Reading, Tap
from moeverify.train.program import Program, compute_dtype_of, dtype_of

Assemble = Callable[[], Program]


@dataclass(frozen=True)
class Shown:
    """What one rank shows of the step where it began.

    `issued` has the collectives that it issued inside each module, by module, in words.
    """

    pieces: list[tuple[Key, Region, Tensor | None]]
    readings: RankReadings
    issued: dict[str, tuple[str, ...]]


Gathered = tuple[int, list[Shown]]


def gather_material(
    case: Case,
    golden: StoredGolden,
    judgement: Judgement | None,
    assemble: Assemble,
    trace: CollectiveTrace,
) -> Gathered | None:
    """Return on rank 0 the step at which it began and what every rank shows of it; None without findings.

    `judgement` is given on rank 0 only. Collective: all ranks.
    """
    request: list[Any] = [_make_request(judgement.findings) if judgement is not None else None]
    dist.broadcast_object_list(request)
    if request[0] is None:
        return None
    step, keys = request[0]
    shown = _rerun(case, golden, assemble(), step, keys, trace)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(shown, gathered)
    return None if gathered is None else (step, gathered)


def conclude(
    case: Case, golden: StoredGolden, judgement: Judgement, gathered: Gathered | None, device: torch.device
) -> list[Finding]:
    """Return the findings with their causes, on rank 0 alone."""
    if gathered is None:
        return diagnose(judgement.findings, Material())
    step, by_rank = gathered
    return _diagnose(case, golden, judgement, step, by_rank, device)


def _make_request(findings: Sequence[Finding]) -> tuple[int, list[Key]] | None:
    """Return the step at which it began and the tensors that are wrong there."""
    step = origin_step(findings)
    if step is None:
        return None
    wrong = {finding.tensor for finding in findings if finding.step == step}
    return step, [(step, kind, name) for kind in _KINDS for name in sorted(wrong)]


_KINDS = (
    "initial_weight",
    "initial_buffer",
    "router_ids",
    "router_counts",
    "router_weights",
    "token_loss",
    "loss",
    "gradient",
    "gradient_norm",
    "update",
    "optimizer_state",
    "buffer",
)


class _StepTap:
    """An observer that captures, and that opens a tap on the model for one step."""

    def __init__(self, capture: Capture, tap: Tap, step: int) -> None:
        self._capture = capture
        self._tap = tap
        self._step = step
        self._context: Any = None

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Capture; see `moeverify.layout.observer.Observer`."""
        self._capture.observe(step, kind, name, local, region)

    def begin_step(self, step: int) -> None:
        """Open the tap before the step of interest, close it after."""
        if step == self._step:
            self._context = self._tap.reading()
            self._context.__enter__()
        elif self._context is not None:
            self.close()

    def close(self) -> None:
        """Close the tap."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


def _rerun(
    case: Case,
    golden: StoredGolden,
    program: Program,
    step: int,
    keys: Sequence[Key],
    trace: CollectiveTrace,
) -> Shown:
    capture = Capture(keys)
    num_positions = len(program.share.positions)
    tap = Tap(
        program.model, num_positions, scale=program.scale, limit=LIMIT, count=lambda: trace.num_collectives
    )
    observer = _StepTap(capture, tap, step)
    recipe, stop = case.recipe, max(step, 0) + 1
    low = recipe.precision != "float64" and program.subject.can_replay
    forced = case.checks.steps == "forced"
    train(recipe, program, observer, golden=golden, replay_routing=low, forced=forced, num_steps=stop)
    observer.close()
    micro_batches = program.share.micro_batches(program.num_micro_batches)
    shares = [(share.rows, share.positions) for share in micro_batches]
    return Shown(capture.pieces, RankReadings(tap.readings, shares), _list_issued(case, tap, trace))


def _list_issued(case: Case, tap: Tap, trace: CollectiveTrace) -> dict[str, tuple[str, ...]]:
    """Return the collectives inside each module, those of the forward pass first."""
    records = {record["number"]: record for record in trace.records()}
    issued: dict[str, tuple[str, ...]] = {}
    for (direction, module), spans in sorted(tap.spans.items(), key=lambda item: item[0][0] != FORWARD):
        numbers = (number for begin, end in spans for number in range(begin + 1, end + 1))
        inside = [records[number] for number in numbers if number in records]
        lines = summarize_records(inside, lambda ranks: name_ranks(case, ranks))
        issued[module] = (*issued.get(module, ()), *(f"{direction}: {line}" for line in lines))
    return issued


def _diagnose(
    case: Case,
    golden: StoredGolden,
    judgement: Judgement,
    step: int,
    gathered: Sequence[Shown],
    device: torch.device,
) -> list[Finding]:
    plan = MeshPlan.of(case.layout)
    coordinates = {rank: plan.coordinates(rank) for rank in range(len(gathered))}

    def read(key: Key) -> Tensor | None:
        found = golden.keys(key[0])
        name = f"{key[1]}/{key[2]}"
        return golden.whole(key[0], name) if name in found else None

    suspects = collect_suspects(
        [shown.pieces for shown in gathered], read, compute_dtype_of(case.recipe.precision)
    )
    failed = _failed_keys(judgement)
    wrong = {key: suspect for key, suspect in suspects.items() if key in failed and suspect.differs()}
    search = _search(case, golden, step, [shown.readings for shown in gathered], coordinates, device)
    forward = search.origins.get(FORWARD) if search is not None else None
    clip = read((step, "gradient_norm", "clip_coefficient")) if step >= 0 else None
    material = Material(
        suspects=wrong,
        axes=Axes(
            list_groups(case), list_degrees(case), lambda axis, tensor: axis_affects(case, axis, tensor)
        ),
        search=search,
        earlier=lambda key: _read_earlier(read, key),
        issued=lambda module, rank: _find_issued(gathered[rank].issued, module),
        components=_component_source(case, golden, step, device),
        num_tokens=case.recipe.data.batch * case.recipe.data.seq_len,
        clip=None if clip is None else float(clip),
        stale=None if forward is None else explains_stale(case.recipe, golden, step, forward, device),
    )
    return diagnose(judgement.findings, material)


def _read_earlier(read: Callable[[Key], Tensor | None], key: Key) -> dict[str, Tensor | None]:
    """Return what the golden held of a tensor a step earlier, and of a buffer before the first."""
    step, kind, name = key
    if step < 0:
        return {}
    initial = read((INITIAL, "initial_buffer", name)) if kind == "buffer" else None
    before = initial if step == 0 else read((step - 1, kind, name))
    return {STEP_BEFORE: before} | ({INITIAL_VALUE: initial} if kind == "buffer" and step > 0 else {})


def _find_issued(issued: Mapping[str, tuple[str, ...]], module: str) -> tuple[str, ...]:
    """Return the collectives inside a module, or else inside the nearest one around it that issued some."""
    around = module
    while around and not issued.get(around):
        around = around.rpartition(".")[0]
    lines = issued.get(around, ())
    if not lines:
        return ("none in this module, nor in one around it",)
    where = "" if around == module else f"in {around or 'the model'}, "
    return tuple(where + line for line in lines)


def _failed_keys(judgement: Judgement) -> set[Key]:
    """Return the logical tensors that differ from the golden, or between replicas."""
    failed: set[Key] = set()
    for finding in judgement.findings:
        kinds = next((check.kinds for check in CHECKS if check.name == finding.check), ())
        if finding.check == REPLICAS:
            kinds = (finding.evidence[0].partition(":")[0],)
        failed |= {(finding.step, kind, finding.tensor) for kind in kinds}
    return failed


def _component_source(
    case: Case, golden: StoredGolden, step: int, device: torch.device
) -> Callable[[], Components] | None:
    if step < 0:
        return None
    return cache(lambda: make_components(case, golden, step, device))


def _search(
    case: Case,
    golden: StoredGolden,
    step: int,
    by_rank: Sequence[RankReadings],
    coordinates: Any,
    device: torch.device,
) -> Search | None:
    if compute_dtype_of(case.recipe.precision) is torch.bfloat16 or step == INITIAL:
        return None  # rounding of bfloat16 hides where it began
    readings = _read_golden(case.recipe, golden, step, device)
    return find_origins(readings, by_rank, coordinates, case.layout.tp, dtype_of(case.recipe.precision))


def _read_golden(recipe: Recipe, golden: StoredGolden, step: int, device: torch.device) -> list[Reading]:
    """Return what one device reads at its modules in the step, started from the golden's state."""
    program = assemble_single(recipe, device, compute="float64")
    tap = Tap(program.model, recipe.data.seq_len, scale=1.0, limit=1 << 62)
    observer = _StepTap(Capture(()), tap, step)
    train(recipe, program, observer, golden=golden, num_steps=step + 1)
    observer.close()
    return tap.readings
