"""`moeverify.watch`: recording started from within a script, without the command."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from moeverify.scripts.record.settings import Settings
from moeverify.scripts.record.start import start


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
