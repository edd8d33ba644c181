"""`moeverify.watch`: the recording of a script that may be changed, without the command."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from moeverify.capture.settings import Settings
from moeverify.capture.start import start


def watch(
    model: nn.Module,
    *optimizers: Optimizer,
    out: str | Path,
    steps: tuple[int, int] = (0, 3),
    outputs: bool = False,
) -> None:
    """Record optimizer steps `steps[0]` to `steps[1]` of this process from now on, for `moeverify compare`.

    Call it after the model is parallelized and before the first step, on every rank, e.g.
    `moeverify.watch(model, optimizer, out="runs/ep2")`. `out` must hold no recorded run. `outputs` records what
    goes into modules and comes out of them too.

    Raises: ValueError where an optimizer has parameters that the model has not.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups]
        if any(id(parameter) not in known for group in groups for parameter in group):
            raise ValueError(f"{type(optimizer).__name__} has parameters that are not of this model")
    settings = Settings(out=Path(out).resolve(), first=steps[0], last=steps[1], outputs=outputs)
    recorder = start(settings.model_dump_json())
    recorder.take_model(model)
