"""On every rank, after a mismatch: run again up to the step where it began, and gather what a diagnosis needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.case.schema import Case, ForeignModel, Recipe
from moeverify.compare.checks import CHECKS, REPLICAS
from moeverify.compare.judging import Judgement
from moeverify.compare.result import Finding
from moeverify.diagnose.components import Components, make_components
from moeverify.diagnose.diagnosis import Material, diagnose, origin_step
from moeverify.diagnose.evidence import LIMIT, Capture, Key, collect_suspects
from moeverify.diagnose.place import Origin, RankReadings, find_origins
from moeverify.diagnose.stale import explains_stale
from moeverify.diagnose.tap import FORWARD, Reading, Tap
from moeverify.golden.store import StoredGolden
from moeverify.layout.mesh import MeshPlan
from moeverify.layout.observer import INITIAL
from moeverify.layout.region import Region
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.program import Program, dtype_of

Assemble = Callable[[], Program]


Gathered = tuple[int, list[tuple[list[Any], RankReadings]]]


def gather_material(
    case: Case, golden: StoredGolden, judgement: Judgement | None, assemble: Assemble
) -> Gathered | None:
    """Return on rank 0 the step at which it began and what every rank shows of it; None without findings.

    `judgement` is given on rank 0 only. Collective: all ranks.
    """
    request: list[Any] = [_make_request(judgement.findings) if judgement is not None else None]
    dist.broadcast_object_list(request)
    if request[0] is None:
        return None
    step, keys = request[0]
    shown = _rerun(case, golden, assemble(), step, keys)
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(shown, gathered)
    return None if gathered is None else (step, gathered)


def conclude(
    case: Case, golden: StoredGolden, judgement: Judgement, gathered: Gathered | None, device: torch.device
) -> list[Finding]:
    """Return the findings with their causes, on rank 0 alone."""
    if gathered is None:
        return diagnose(judgement.findings, Material({}, {}, {}, {}, {}))
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
    case: Case, golden: StoredGolden, program: Program, step: int, keys: Sequence[Key]
) -> tuple[list[Any], RankReadings]:
    capture = Capture(keys)
    tap = Tap(program.model, len(program.share.positions), scale=program.scale, limit=LIMIT)
    observer = _StepTap(capture, tap, step)
    recipe = case.recipe.model_copy(update={"steps": max(step, 0) + 1})
    low = recipe.precision != "float64" and not isinstance(recipe.model, ForeignModel)
    forced = case.checks.steps == "forced"
    train(recipe, program, observer, golden=golden, replay_routing=low, forced=forced)
    observer.close()
    micro_batches = program.share.micro_batches(program.num_micro_batches)
    shares = [(share.rows, share.positions) for share in micro_batches]
    return capture.pieces, RankReadings(tap.readings, shares)


def _diagnose(
    case: Case,
    golden: StoredGolden,
    judgement: Judgement,
    step: int,
    gathered: Sequence[tuple[list[Any], RankReadings]],
    device: torch.device,
) -> list[Finding]:
    plan = MeshPlan.of(case.layout)
    coordinates = {rank: plan.coordinates(rank) for rank in range(len(gathered))}

    def read(key: Key) -> Tensor | None:
        found = golden.keys(key[0])
        name = f"{key[1]}/{key[2]}"
        return golden.whole(key[0], name) if name in found else None

    suspects = collect_suspects([pieces for pieces, _ in gathered], read, dtype_of(case.recipe.precision))
    failed = _failed_keys(judgement)
    wrong = {key: suspect for key, suspect in suspects.items() if key in failed and suspect.differs()}
    readings = [found for _, found in gathered]
    origins = _find_origins(case, golden, step, readings, coordinates, device)
    clip = read((step, "gradient_norm", "clip_coefficient")) if step >= 0 else None
    material = Material(
        suspects=wrong,
        origins=origins,
        groups=_groups(plan),
        degrees=_degrees(case, plan),
        previous={key: value for key in wrong if (value := _read_previous(read, key)) is not None},
        components=_component_source(case, golden, step, device),
        num_tokens=case.recipe.data.batch * case.recipe.data.seq_len,
        clip=None if clip is None else float(clip),
        stale=FORWARD in origins and explains_stale(case.recipe, golden, step, origins[FORWARD], device),
    )
    return diagnose(judgement.findings, material)


def _groups(plan: MeshPlan) -> dict[str, list[list[int]]]:
    """Return the groups of ranks of every axis with more than one rank, of the data and of the expert axes."""
    views = (
        (plan.data, plan.data.axes),
        (plan.sparse, [a for a in plan.sparse.axes if a not in plan.data.axes]),
    )
    return {axis: view.groups(axis) for view, axes in views for axis in axes if view.axes[axis] > 1}


def _read_previous(read: Callable[[Key], Tensor | None], key: Key) -> Tensor | None:
    """Return what the golden held of a buffer one step earlier."""
    step, kind, name = key
    if kind != "buffer":
        return None
    return read((INITIAL, "initial_buffer", name)) if step == 0 else read((step - 1, "buffer", name))


def _failed_keys(judgement: Judgement) -> set[Key]:
    """Return the logical tensors that differ from the golden, or between replicas."""
    failed: set[Key] = set()
    for finding in judgement.findings:
        kinds = next((check.kinds for check in CHECKS if check.name == finding.check), ())
        if finding.check == REPLICAS:
            kinds = (finding.evidence[0].partition(":")[0],)
        failed |= {(finding.step, kind, finding.tensor) for kind in kinds}
    return failed


def _degrees(case: Case, plan: MeshPlan) -> dict[str, int]:
    """Return the sizes that a factor may come from; expert axes only where there are experts."""
    model = case.recipe.model
    has_experts = isinstance(model, ForeignModel) or model.moe is not None
    axes = {**(plan.sparse.axes if has_experts and case.layout.ep > 1 else {}), **plan.data.axes}
    degrees = {axis: size for axis, size in axes.items() if size > 1}
    for name, size in (("loss ranks", plan.loss.axes["loss"]), ("all ranks", plan.world_size)):
        if size not in degrees.values():
            degrees[name] = size
    degrees["micro-batches"] = case.layout.micro_batches
    return {name: size for name, size in degrees.items() if size > 1}


def _component_source(
    case: Case, golden: StoredGolden, step: int, device: torch.device
) -> Callable[[], Components] | None:
    if isinstance(case.recipe.model, ForeignModel) or step < 0:
        return None
    return cache(lambda: make_components(case, golden, step, device))


def _find_origins(
    case: Case,
    golden: StoredGolden,
    step: int,
    by_rank: Sequence[RankReadings],
    coordinates: Any,
    device: torch.device,
) -> dict[str, Origin]:
    if case.recipe.precision == "bfloat16" or step == INITIAL:
        return {}  # rounding of bfloat16 hides where it began
    readings = _read_golden(case.recipe, golden, step, device)
    return find_origins(readings, by_rank, coordinates, case.layout.tp, dtype_of(case.recipe.precision))


def _read_golden(recipe: Recipe, golden: StoredGolden, step: int, device: torch.device) -> list[Reading]:
    """Return what one device reads at its modules in the step, started from the golden's state."""
    program = assemble_single(recipe, device, compute="float64")
    tap = Tap(program.model, recipe.data.seq_len, scale=1.0, limit=1 << 62)
    observer = _StepTap(Capture(()), tap, step)
    shortened = recipe.model_copy(update={"steps": step + 1})
    train(shortened, program, observer, golden=golden)
    observer.close()
    return tap.readings
