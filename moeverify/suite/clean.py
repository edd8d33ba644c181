"""The clean matrix: runs in which nothing is wrong, over layouts, recipes, precisions, seeds and null faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from moeverify.case.rules import validate
from moeverify.case.schema import Case
from moeverify.compare.result import CaseResult, Event
from moeverify.compare.score import CleanRow
from moeverify.faults import null
from moeverify.faults.setting import make_case
from moeverify.suite.options import RunOptions
from moeverify.suite.run import run_cases

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"dp_replicate": 2, "data_parallel": "ddp"},
    "ddp-ep": {"dp_replicate": 2, "data_parallel": "ddp", "ep": 2},
    "fsdp1": {"dp_shard": 2, "data_parallel": "fsdp1"},
    "fsdp2": {"dp_shard": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp2-ep": {"dp_shard": 2, "ep": 2},
    "fsdp2x4-ep2": {"dp_shard": 4, "ep": 2},
    "ep4": {"dp_shard": 4, "ep": 4},
    "tp": {"tp": 2},
    "tp-sp-lp": {"tp": 2, "sequence_parallel": True, "loss_parallel": True},
    "fsdp2-tp": {"dp_shard": 2, "tp": 2},
    "tp-ep": {"tp": 2, "ep": 2},
    "tp-ep-etp": {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2},
    "cp-allgather": {"cp": 2},
    "cp-alltoall": {"cp": 2, "context_parallel": "alltoall"},
    "fsdp2-cp-ep": {"dp_shard": 2, "cp": 2, "ep": 4},
}

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "stress sgd": {},
    "stress adamw": {"optimizer": "adamw"},
    "tied adamw": {"preset": "stress-tied", "optimizer": "adamw"},
    "mixtral sgd": {"preset": "tiny-mixtral-8x7b"},
    "deepseek routing adamw": {"preset": "tiny-deepseek-v3-routing", "optimizer": "adamw"},
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "recompute": {"recompute": True},
    "micro-batches": {"micro_batches": 2},
    "fused optimizer": {"optimizer": "fused"},
}


def clean_cases(num_seeds: int) -> Iterator[tuple[str, Case, str | None]]:
    """Yield (group, case, null fault) of every clean run whose layout fits its recipe."""
    for seed in range(num_seeds):
        for recipe, options in RECIPES.items():
            for layout, degrees in LAYOUTS.items():
                yield from _make("float64", f"{recipe}, {layout}", seed, options, degrees)
                if recipe in ("stress adamw", "mixtral sgd"):
                    yield from _make("float32", f"{recipe}, {layout}", seed, options, degrees)
                if recipe == "stress adamw":
                    yield from _make("bfloat16", f"{recipe}, {layout}", seed, options, degrees)
        for layout, degrees in LAYOUTS.items():
            yield from _make_nulls(seed, layout, degrees)


def _make_nulls(seed: int, layout: str, degrees: Mapping[str, Any]) -> Iterator[tuple[str, Case, str | None]]:
    base = RECIPES["stress adamw"]
    reverse = f"{null.__name__}:{null.reverse_reductions.__name__}"
    for group, case, _ in _make("float64", f"reversed reductions, {layout}", seed, base, degrees):
        yield group.replace("float64", "null: reversed reductions"), case, reverse
    for variant, change in VARIANTS.items():
        fused = {"layout_optimizer": change["optimizer"]} if "optimizer" in change else change
        for group, case, _ in _make("float64", f"{variant}, {layout}", seed, base, {**degrees, **fused}):
            yield group.replace("float64", f"null: {variant}"), case, None


def _make(
    precision: str, name: str, seed: int, options: Mapping[str, Any], degrees: Mapping[str, Any]
) -> Iterator[tuple[str, Case, str | None]]:
    layout = dict(degrees)
    chosen = layout.pop("layout_optimizer", None)
    recipe = {"precision": precision, "seed": seed}
    case = make_case(f"{precision}, seed {seed}, {name}", recipe=recipe, **options, **layout)
    if chosen is not None:
        case = case.model_copy(update={"layout": case.layout.model_copy(update={"optimizer": chosen})})
    if not list(validate(case)):
        yield precision, case, None


def run_clean(num_seeds: int, options: RunOptions, on_event: Callable[[Event], None]) -> list[CleanRow]:
    """Return one row a clean run; whatever is not `pass` is a false positive or a run that did not end."""
    runs = list(clean_cases(num_seeds))
    nulls = {case.name: fault for _, case, fault in runs if fault is not None}
    result = run_cases([case for _, case, _ in runs], replace(options, case_faults=nulls), on_event)
    if result is None:
        return []
    return [_row(group, case) for (group, _, _), case in zip(runs, result.cases, strict=True)]


def _row(group: str, case: CaseResult) -> CleanRow:
    worst = [check.worst for check in case.checks if check.worst is not None and check.worst.bound > 0]
    used = max((entry.error / entry.bound for entry in worst if math.isfinite(entry.error)), default=0.0)
    detail = case.reason or "; ".join(f"{f.check} {f.tensor} step {f.step}" for f in case.findings[:3])
    return CleanRow(name=case.name, group=group, verdict=case.verdict, worst=used, detail=detail)
