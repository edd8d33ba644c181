"""On the ranks: goldens that are not kept yet, each made by one rank alone, side by side."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from pydantic import TypeAdapter

from moeverify.case.schema import Recipe
from moeverify.errors import CaseError, FormatError
from moeverify.golden.store import StoredGolden, is_stored
from moeverify.jobs import GoldenJob, GoldenOrder, GoldenResult, GoldenSummary, Refusal
from moeverify.launch.plan import write_atomically
from moeverify.launch.runner import RankContext
from moeverify.launch.single_rank_world import single_rank_world
from moeverify.layout.observer import INITIAL
from moeverify.recording.golden import make_golden
from moeverify.train.target import describe_error, import_path

_ANSWERS: TypeAdapter[GoldenSummary | Refusal] = TypeAdapter(GoldenSummary | Refusal)


def make_goldens(context: RankContext, job: GoldenJob) -> GoldenResult | None:
    """Make the goldens that are not kept, each on one rank; return their summaries on rank 0."""
    for number in range(context.rank, len(job.orders), context.world_size):
        order = job.orders[number]
        with import_path(order.search_path), single_rank_world(context.device):
            answer = _make_one(order, find_folder(order.folder, context.device), context.device)
        context.store.set(f"golden {number}", answer.model_dump_json())
    if context.rank != 0:
        return None
    texts = [context.store.get(f"golden {number}") for number in range(len(job.orders))]
    found = tuple(_ANSWERS.validate_json(text) for text in texts)
    return GoldenResult(goldens=found, device_class=device_class(context.device))


def _make_one(order: GoldenOrder, folder: Path, device: torch.device) -> GoldenSummary | Refusal:
    recipe = order.recipe
    _error_file(folder).unlink(missing_ok=True)
    try:
        if order.fresh or not is_stored(folder):
            make_golden(recipe, folder, device, also=order.also)
        try:
            return _read_summary(recipe, folder)
        except FormatError:
            make_golden(recipe, folder, device, also=order.also)
            return _read_summary(recipe, folder)
    except CaseError as error:
        return _note_error(folder, str(error))
    except Exception as error:
        if not recipe.model.functions:
            raise
        text = f"one device cannot train `{recipe.model.title}`: {describe_error(error)}"
        return _note_error(folder, text)


def _read_summary(recipe: Recipe, folder: Path) -> GoldenSummary:
    """Return the summary of a full golden, all of whose files can be read."""
    golden = StoredGolden(folder)
    for step in range(INITIAL, recipe.steps):
        golden.keys(step)
    return GoldenSummary.model_validate(golden.summary)


def _note_error(folder: Path, text: str) -> Refusal:
    """Leave word for the cases that need this golden, so that none of them tries again."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_error_file(folder), text)
    return Refusal(error=text)


def read_error(folder: Path) -> str:
    """Return why the golden of this folder could not be made, or nothing."""
    try:
        return _error_file(folder).read_text()
    except FileNotFoundError:
        return ""


def _error_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.error")


def find_folder(folder: Path, device: torch.device) -> Path:
    """Return the folder of a full golden that a device makes, whether or not it is there."""
    return folder.with_name(f"{folder.name}-{device_class(device)}")


def device_class(device: torch.device) -> str:
    """Return the name of the kind of device: goldens of different kinds differ in rounding."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device)).strip("-").lower()
