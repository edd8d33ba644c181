"""The learning rate of each step: the recipe's rate times a warmup and a decay factor."""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moeverify.cases.schema import Optimizer as OptimizerSpec
from moeverify.train.decay import RATE_SCHEDULE


def build_schedule(spec: OptimizerSpec, optimizer: Optimizer, num_steps: int) -> LambdaLR:
    """Return the schedule for `num_steps`; it stores each group's learning rate as `initial_lr`."""
    return LambdaLR(optimizer, partial(find_factor, spec, num_steps))


def list_rates(spec: OptimizerSpec, num_steps: int) -> list[float]:
    """Return the learning rate of each step of a recipe."""
    return [spec.lr * find_factor(spec, num_steps, step) for step in range(num_steps)]


def find_factor(spec: OptimizerSpec, num_steps: int, step: int) -> float:
    """Return the factor of the learning rate at a step.

    Example: with 2 warmup steps of 6 and a linear decay, the factors are 1/3, 2/3, 1, 3/4, 1/2 and 1/4.

    The factor rises linearly over `warmup_steps` and is 1 at the following step. It then decays towards 0
    at step `num_steps`: as a cosine, linearly, or not at all.
    """
    if step < spec.warmup_steps:
        return (step + 1) / (spec.warmup_steps + 1)
    # LambdaLR asks for a rate after the last step as well, and all steps may be warmup.
    part = min(1.0, (step - spec.warmup_steps) / max(num_steps - spec.warmup_steps, 1))
    return RATE_SCHEDULE.find(spec.schedule).factor(part)
