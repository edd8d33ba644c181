"""Start of the recording in this process, by the command or by `moeverify.watch` within a script."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from moeverify.scripts.record.recorder import ScriptRecorder
from moeverify.scripts.record.settings import Settings
from moeverify.train.calls.hooks import install


def start(text: str, rank: str | None = None, world_size: str | None = None) -> ScriptRecorder:
    """Record the training of this process from now on, and return the recorder.

    `text` has the settings as JSON. `rank` and `world_size` come from the launcher and are used until a
    process group exists.
    """
    settings = Settings.model_validate_json(text)
    if settings.seed is not None:
        seed_all(settings.seed)
    recorder = ScriptRecorder(settings, int(rank or 0), int(world_size or 1))
    install(recorder)
    return recorder


def seed_all(seed: int) -> None:
    """Seed the generators of torch, NumPy and Python. A script may seed them again later."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def watch(
    model: nn.Module,
    *optimizers: Optimizer,
    out: str | Path,
    steps: tuple[int, int] = (0, 3),
    outputs: bool = False,
) -> None:
    """Record optimizer steps `steps[0]` to `steps[1]` of this process, for `moeverify compare`.

    Call it on every rank after the model is parallelized and before the first step. `out` must not contain
    a recorded run. `outputs` also records the inputs and outputs of modules. For example:

        moeverify.watch(model, optimizer, out="runs/ep2")

    Raises: ValueError when an optimizer has parameters that are not in the model.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        if any(id(parameter) not in known for group in groups for parameter in group):
            raise ValueError(f"{type(optimizer).__name__} has parameters that are not of this model")
    settings = Settings(out=Path(out).resolve(), first=steps[0], last=steps[1], outputs=outputs)
    recorder = start(settings.model_dump_json())
    recorder.take_model(model)
