"""The clean matrix: correct runs over layouts, recipes, precisions, seeds and null faults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moeverify.cases.schema import Case
from moeverify.cases.select import read_pattern
from moeverify.cases.validation.rules import validate
from moeverify.errors import CaseError, Problem
from moeverify.faults.setting import make_case
from moeverify.results.benchmark_rows import CleanRow
from moeverify.results.run import CaseResult
from moeverify.verification.controller.kept import KeptRows
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import OnEvent, pass_results, run_cases

_STAGES: Mapping[str, Any] = {"pp": 2, "micro_batches": 4, "stage_layers": (2, 1)}
_VIRTUAL: Mapping[str, Any] = {"pp": 2, "micro_batches": 4, "stage_layers": (0, 1, 1, 1)}
_SEQUENCE: Mapping[str, Any] = {"sequence_parallel": True, "loss_parallel": True}

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"dp_replicate": 2, "data_parallel": "ddp"},
    "ddp-ep": {"dp_replicate": 2, "data_parallel": "ddp", "ep": 2},
    "fsdp1": {"dp_shard": 2, "data_parallel": "fsdp1"},
    "fsdp1-grad-op": {"dp_shard": 2, "data_parallel": "fsdp1", "fsdp1_strategy": "shard_grad_op"},
    "fsdp1-hybrid": {"dp_replicate": 2, "dp_shard": 2, "data_parallel": "fsdp1"},
    "fsdp2": {"dp_shard": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "hsdp-ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "fsdp2-ep": {"dp_shard": 2, "ep": 2},
    "fsdp2x4-ep2": {"dp_shard": 4, "ep": 2},
    "ep4": {"dp_shard": 4, "ep": 4},
    "tp": {"tp": 2},
    "tp-sp-lp": {"tp": 2, **_SEQUENCE},
    "fsdp2-tp": {"dp_shard": 2, "tp": 2},
    "tp-ep": {"tp": 2, "ep": 2},
    "tp-ep-etp": {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2},
    "tp-etp1": {"tp": 2, "dp_shard": 2, "etp": 1, "sequence_parallel": True},
    "tp-etp4": {"tp": 2, "dp_shard": 2, "etp": 4},
    "ep-etp": {"dp_shard": 4, "ep": 2, "etp": 2},
    "cp-allgather": {"cp": 2},
    "cp-alltoall": {"cp": 2, "context_parallel": "alltoall"},
    "fsdp2-cp-ep": {"dp_shard": 2, "cp": 2, "ep": 4},
    "cp-tp": {"cp": 2, "tp": 2},
    "pp": _STAGES,
    "pp-gpipe": {"pp": 2, "micro_batches": 2, "pipeline_schedule": "gpipe"},
    "pp-interleaved": {**_VIRTUAL, "pipeline_schedule": "interleaved_1f1b"},
    "pp-zero-bubble": {**_VIRTUAL, "pipeline_schedule": "interleaved_zero_bubble"},
    "pp-zbv": {**_VIRTUAL, "pipeline_schedule": "zbv"},
    "fsdp2-ep-pp": {**_STAGES, "dp_shard": 2, "ep": 2},
    "tp-pp": {**_STAGES, "tp": 2, **_SEQUENCE},
    "cp-pp": {**_STAGES, "cp": 2},
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


_FORCED: Mapping[str, Any] = {"checks": {"steps": "forced"}}
_BLOCKS: Mapping[str, Any] = {"checks": {"steps": "forced", "also": ("forced blocks",)}}
_ROWS: Mapping[str, Any] = {"recipe": {"float8": "rowwise"}}

NARROW: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    ("bfloat16", "forced steps", _FORCED),
    ("bfloat16", "forced blocks", _BLOCKS),
    ("mixed", "forced blocks", _BLOCKS),
    ("bfloat16", "micro-batches", {"micro_batches": 2}),
    ("mixed", "micro-batches", {"micro_batches": 2}),
    ("float64", "float8 by rows", {"recipe": {"float8": "rowwise_with_gw_hp"}}),
    ("mixed", "float8 by rows", _ROWS),
    ("mixed", "float8 by rows, forced blocks", {**_ROWS, **_BLOCKS}),
    ("bfloat16", "float8 by tensors", {"recipe": {"float8": "tensorwise"}}),
)
"""(precision, name, options) of additional runs of one recipe under every layout. The layout's fields win."""

REVERSED = "moeverify.faults.null:reverse_reductions"
"""A null fault, by name because its module imports torch."""

CleanRun = tuple[str, Case, str | None]  # (group, case, null fault)


def clean_cases(num_seeds: int) -> Iterator[CleanRun]:
    """Yield (group, case, null fault) of every clean run whose layout is valid for its recipe."""
    for seed in range(num_seeds):
        for recipe, options in RECIPES.items():
            for layout, degrees in LAYOUTS.items():
                yield from _make("float64", f"{recipe}, {layout}", seed, options, degrees)
                if recipe in ("stress adamw", "mixtral sgd"):
                    yield from _make("float32", f"{recipe}, {layout}", seed, options, degrees)
                if recipe in ("stress sgd", "stress adamw", "mixtral sgd"):
                    yield from _make("mixed", f"{recipe}, {layout}", seed, options, degrees)
                if recipe == "stress adamw":
                    yield from _make("bfloat16", f"{recipe}, {layout}", seed, options, degrees)
                    yield from _make_variants(recipe, seed, layout, degrees)
        for layout, degrees in LAYOUTS.items():
            yield from _make_nulls(seed, layout, degrees)


def _make_variants(recipe: str, seed: int, layout: str, degrees: Mapping[str, Any]) -> Iterator[CleanRun]:
    """Yield the runs of a layout with forced steps or blocks, micro-batches, or float8 linear layers."""
    for precision, variant, change in NARROW:
        options = {**RECIPES[recipe], **change}
        for _, case, _ in _make(precision, f"{variant}, {recipe}, {layout}", seed, options, degrees):
            yield f"{precision}, {variant}", case, None


def _make_nulls(seed: int, layout: str, degrees: Mapping[str, Any]) -> Iterator[CleanRun]:
    base = RECIPES["stress adamw"]
    for group, case, _ in _make("float64", f"reversed reductions, {layout}", seed, base, degrees):
        yield group.replace("float64", "null: reversed reductions"), case, REVERSED
    for variant, change in VARIANTS.items():
        fused = {"layout_optimizer": change["optimizer"]} if "optimizer" in change else change
        for group, case, _ in _make("float64", f"{variant}, {layout}", seed, base, {**degrees, **fused}):
            yield group.replace("float64", f"null: {variant}"), case, None


def _make(
    precision: str, name: str, seed: int, options: Mapping[str, Any], degrees: Mapping[str, Any]
) -> Iterator[CleanRun]:
    layout = dict(degrees)
    chosen = layout.pop("layout_optimizer", None)
    recipe = {"precision": precision, "seed": seed, **options.get("recipe", {})}
    case = make_case(f"{precision}, seed {seed}, {name}", **{**options, "recipe": recipe, **layout})
    if chosen is not None:
        case = case.model_copy(update={"layout": case.layout.model_copy(update={"optimizer": chosen})})
    if not list(validate(case)):
        yield precision, case, None


def choose_clean(num_seeds: int, pattern: str | None = None) -> list[CleanRun]:
    """Return the clean runs whose names match a pattern, or all runs without a pattern.

    Raises: CaseError when the pattern is invalid or nothing matches.
    """
    runs = list(clean_cases(num_seeds))
    matches = read_pattern(pattern)
    chosen = [run for run in runs if matches(f"{run[0]}, {run[1].name}")]
    if not chosen:
        remedy = f"names are such as `{runs[0][1].name}` and `{runs[-1][1].name}`"
        raise CaseError(
            [Problem(f"no clean run of {len(runs)} matches `{pattern}`", path="-k", remedy=remedy)]
        )
    return chosen


def run_clean(
    runs: Sequence[CleanRun],
    options: RunOptions,
    on_event: OnEvent,
    kept: KeptRows[CleanRow],
) -> list[CleanRow]:
    """Return one row per clean run. Any verdict but `pass` is a false positive or an incomplete run.

    Skips the runs in `kept`, and adds new rows to it.
    """
    groups = {case.name: group for group, case, _ in runs}
    left = [(case, null) for _, case, null in runs if case.name not in kept.rows]

    def take(result: CaseResult) -> None:
        kept.add(_row(groups[result.name], result))

    if left:
        nulls = {case.name: null for case, null in left if null is not None}
        run_cases(
            [case for case, _ in left], replace(options, case_faults=nulls), pass_results(take, on_event)
        )
    return [kept.rows[case.name] for _, case, _ in runs if case.name in kept.rows]


def _row(group: str, case: CaseResult) -> CleanRow:
    worst = [check.worst for check in case.checks if check.worst is not None and check.worst.bound > 0]
    used = max((entry.error / entry.bound for entry in worst if math.isfinite(entry.error)), default=0.0)
    detail = case.reason or "; ".join(f"{f.check} {f.tensor} step {f.step}" for f in case.findings[:3])
    return CleanRow(
        name=case.name,
        group=group,
        verdict=case.verdict,
        worst=used,
        tensors=sum(check.tensors for check in case.checks),
        blind=sum(check.inconclusive for check in case.checks),
        seconds=case.seconds,
        detail=detail,
    )
