"""Recording of a case's operators up to the first step that differs, on every rank and on a single device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from moeverify.cases.schema import Case, Recipe
from moeverify.explain.packed import pack, unpack
from moeverify.explain.program import BATCH, Program
from moeverify.explain.record import Recorder
from moeverify.train.assemble import assemble_single
from moeverify.train.data import MicroBatch, Share
from moeverify.train.loop import train
from moeverify.train.program import TrainingProgram
from moeverify.train.subject import TestedModel
from moeverify.train.subjects import replays_routing
from moeverify.verification.golden.store import StoredGolden


def record(
    recipe: Recipe,
    golden: StoredGolden,
    assemble: Callable[[], TrainingProgram],
    step: int,
    *,
    forced: bool = False,
) -> Program:
    """Return the recorded program of this process up to the end of a step. Collective where `assemble` is."""
    recorder = Recorder()
    with recorder.recording():
        training = assemble()
        training.subject = cast(TestedModel, _QuietBatches(training.subject, recorder))
        recorder.name_modules(training.model)
        recorder.name_tensors((shard.name, shard.tensor) for shard in [*training.shards, *training.buffers])
        train(
            recipe,
            training,
            recorder,
            golden=golden,
            replay_routing=replays_routing(recipe),
            forced=forced,
            num_steps=max(step, 0) + 1,
        )
    recorder.program.shares = [
        (tuple(share.rows), tuple(share.positions))
        for share in training.share.micro_batches(training.num_micro_batches)
    ]
    return recorder.program


class _QuietBatches:
    """Subject that makes its batches without recording: batches are inputs of a step."""

    def __init__(self, inner: TestedModel, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def make_batch(self, step: int, share: Share, device: torch.device) -> MicroBatch:
        """Return a micro-batch and label its tensors."""
        with self._recorder.paused():
            batch = self._inner.make_batch(step, share, device)
        named = {field.name: getattr(batch, field.name) for field in fields(batch)}
        self._recorder.name_tensors(
            (f"{BATCH}{name}", value) for name, value in named.items() if isinstance(value, Tensor)
        )
        return batch


def record_ranks(
    case: Case, golden: StoredGolden, assemble: Callable[[], TrainingProgram], step: int
) -> list[Program] | None:
    """Record the programs of all ranks. Return them on rank 0, None elsewhere. Collective: all ranks."""
    found = record(case.recipe, golden, assemble, step, forced=case.checks.steps == "forced")
    is_first = dist.get_rank() == 0
    gathered = [b""] * dist.get_world_size() if is_first else None
    dist.gather_object(b"" if is_first else pack(found), gathered)
    return None if gathered is None else [found, *map(unpack, gathered[1:])]


def record_one_device(recipe: Recipe, golden: StoredGolden, step: int, device: torch.device) -> Program:
    """Return the recorded program of the single-device run. No collective."""
    return record(recipe, golden, lambda: assemble_single(recipe, device, compute="float64"), step)
