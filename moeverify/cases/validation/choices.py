"""All choices between implementations, one per line, and the rules that hold for every choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moeverify.cases.axes.schedules import PIPELINE_SCHEDULE
from moeverify.cases.choice import FieldOptions, Implementation, chosen_option
from moeverify.cases.rule import Rule
from moeverify.cases.schema import Case
from moeverify.model.attention_cores import ATTENTION
from moeverify.model.expert_backends import EXPERT_RULES, EXPERTS
from moeverify.model.float8_scaling import FLOAT8
from moeverify.parallel.compile import COMPILE
from moeverify.parallel.context_parallel import CONTEXT_PARALLEL, POSITION_RULES
from moeverify.parallel.data_parallel import DATA_PARALLEL, DATA_RULES
from moeverify.parallel.dispatch import DISPATCH
from moeverify.parallel.fsdp1_strategies import FSDP1_STRATEGY
from moeverify.parallel.fsdp2_reshard import RESHARD
from moeverify.parallel.graphs import GRAPHS
from moeverify.parallel.router_losses import ROUTER_LOSSES
from moeverify.parallel.rules import PARALLEL_RULES
from moeverify.results.obstacle import Obstacle
from moeverify.train.decay import RATE_SCHEDULE
from moeverify.train.optimizer_kinds import OPTIMIZER, OPTIMIZER_KERNELS, OPTIMIZER_RULES

CHOICES: tuple[FieldOptions[Implementation], ...] = (
    DATA_PARALLEL,
    FSDP1_STRATEGY,
    RESHARD,
    CONTEXT_PARALLEL,
    ATTENTION,
    EXPERTS,
    FLOAT8,
    DISPATCH,
    COMPILE,
    GRAPHS,
    ROUTER_LOSSES,
    PIPELINE_SCHEDULE,
    OPTIMIZER_KERNELS,
    OPTIMIZER,
    RATE_SCHEDULE,
)

CHOICE_RULES: tuple[Rule, ...] = (
    *POSITION_RULES,
    *DATA_RULES,
    *EXPERT_RULES,
    *PARALLEL_RULES,
    *OPTIMIZER_RULES,
)


def list_chosen(case: Case) -> Iterator[tuple[FieldOptions[Any], Implementation]]:
    """Yield each choice with the implementation that the case selects, if any."""
    for choice in CHOICES:
        option = chosen_option(case, choice)
        if choice.has(option):
            yield choice, choice.find(option)


def find_obstacle(case: Case, device: str, backend: str) -> Obstacle | None:
    """Return the reason why a valid case cannot run on this device and backend, or None.

    `device` is a device type such as `cpu` or `cuda`, and `backend` a backend of torch.distributed such as
    `gloo`.
    """
    for _, chosen in list_chosen(case):
        obstacle = chosen.find_obstacle(case, device, backend)
        if obstacle is not None:
            return obstacle
    return None
