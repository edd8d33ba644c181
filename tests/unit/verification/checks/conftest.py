"""Real training on one device under a check's own observer, for checks that compare a rank with itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from moeverify.cases.schema import Case
from moeverify.cases.validation.load import build_case
from moeverify.train.assemble import assemble_single
from moeverify.train.loop import train
from moeverify.train.program import TrainingProgram
from moeverify.train.schedule import list_rates
from moeverify.verification.checks.base import CheckOutcome, ShownTensors, Watch
from moeverify.verification.checks.optimizer_step import OptimizerWatch, judge_rows

MODEL = {
    "vocab_size": 32,
    "hidden": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 16,
}


def make_case(optimizer: Mapping[str, Any], precision: str, moe: Mapping[str, Any] | None = None) -> Case:
    """Return a case of two ranks; the tests train its recipe only."""
    recipe = {
        "model": {**MODEL, **({"moe": dict(moe)} if moe else {})},
        "data": {"batch": 4, "seq_len": 32},
        "steps": 3,
        "optimizer": dict(optimizer),
        "precision": precision,
    }
    return build_case({"name": "hand", "recipe": recipe, "layout": {"dp_shard": 2}})


@pytest.fixture
def train_alone() -> Callable[..., Any]:
    """Return a function that trains a case's recipe on one device and returns the report of a watch."""

    def do(case: Case, make_watch: Callable[[TrainingProgram], Watch[Any]], kernels: str = "foreach") -> Any:
        program = assemble_single(case.recipe, torch.device("cpu"))
        program.optimizer_implementation = kernels
        watch = make_watch(program)
        train(case.recipe, program, watch)
        watch.close()
        return watch.report()

    return do


@pytest.fixture
def make_one_device_case() -> Callable[..., Case]:
    """Return `make_case`."""
    return make_case


@pytest.fixture
def judge_steps(
    run_ranks: Callable[..., Any], train_alone: Callable[..., Any]
) -> Callable[..., CheckOutcome]:
    """Return a function that trains with an optimizer on one device and judges its steps."""
    shown: ShownTensors = run_ranks({0: {}}).shown()

    def do(optimizer: Mapping[str, Any], precision: str, **options: Any) -> CheckOutcome:
        case = make_case({**optimizer, **options}, precision)
        rows = train_alone(case, lambda program: OptimizerWatch(case.recipe, program))
        rates = list_rates(case.recipe.optimizer, case.recipe.steps)
        return judge_rows(replace(shown, case=case), [rows], rates)

    return do
