"""The mutation benchmark: runs each mutant under a few layouts that cover the mutated code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from moeverify.cases.axes.expert_placement import is_placed
from moeverify.cases.axes.groups import TOP_K, list_degrees
from moeverify.cases.axes.stages import count_stages, end_ranks
from moeverify.cases.schema import Case, Precision
from moeverify.cases.validation.rules import validate
from moeverify.faults.mutation.coverage import read_spans
from moeverify.faults.mutation.mutant import Mutant, choose_mutants, find_mutant, list_mutants
from moeverify.faults.mutation.reviewed import EQUIVALENT
from moeverify.faults.mutation.sites import DATA_AXES
from moeverify.faults.setting import make_case
from moeverify.report.words.cause import describe_cause
from moeverify.results.mutation import CoveredCode, MutantRow, Outcome, Span
from moeverify.results.run import CaseResult
from moeverify.verification.controller.clean_matrix import LAYOUTS
from moeverify.verification.controller.escalation import (
    escalate,
    find_confirming,
    needs_escalation,
    try_precision,
)
from moeverify.verification.controller.fault_benchmark import sees_loss_and_norm, sees_loss_curve
from moeverify.verification.controller.kept import KeptRows
from moeverify.verification.controller.machine import choose_device, describe_environment
from moeverify.verification.controller.options import RunOptions
from moeverify.verification.controller.run import (
    CaseTask,
    OnEvent,
    find_machine,
    pass_results,
    run_case_tasks,
    run_cases,
)
from moeverify.verification.controller.scratch import scratch_folder
from moeverify.verification.jobs import CoverageJob

_LONG: Mapping[str, Any] = {"batch": 4, "seq_len": 288}
_FLOAT8: Mapping[str, Any] = {"precision": "bfloat16", "float8": "rowwise_with_gw_hp"}
# Experts on two ranks, some of them on both.
_PLACED = ((0, 1, 2, 3, 4, 5, 6, 7, 8), (2, 7, 8, 9, 10, 11, 12, 13, 14, 15))

# Features that the layouts of the clean matrix do not cover: another attention core, tied embeddings,
# latent attention, more micro-batches, weight decay, expert placement, all kinds of replicas, sequences
# longer than bfloat16 can count, gathered weights with delayed weight gradients, and other precisions. If a
# group is the whole world, a mutant that uses another group has no effect, so each feature also appears in
# combination with data parallelism.
_MORE: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "cp-ring": ({}, {"cp": 2, "context_parallel": "ring"}),
    "cp4-ring": ({}, {"cp": 4, "context_parallel": "ring"}),
    "fsdp2-cp-ring": ({}, {"dp_shard": 2, "cp": 2, "context_parallel": "ring"}),
    "fsdp2-cp-alltoall": ({}, {"dp_shard": 2, "cp": 2, "context_parallel": "alltoall"}),
    "fsdp1-hybrid decay": ({"optimizer": "adamw"}, LAYOUTS["fsdp1-hybrid"]),
    "fsdp2-ep-pp decay": ({"optimizer": "adamw"}, LAYOUTS["fsdp2-ep-pp"]),
    "tied fsdp2-tp": ({"preset": "stress-tied"}, LAYOUTS["fsdp2-tp"]),
    "tied tp-sp-lp": ({"preset": "stress-tied"}, LAYOUTS["tp-sp-lp"]),
    "tied pp": ({"preset": "stress-tied"}, {**LAYOUTS["pp"], "stage_layers": (1, 1)}),
    "fsdp2-pp-zbv": ({}, {**LAYOUTS["pp-zbv"], "dp_shard": 2}),
    "tied pp-zbv": ({"preset": "stress-tied"}, {**LAYOUTS["pp-zbv"], "stage_layers": (0, 1, 1, 0)}),
    "head norms fsdp2-tp": ({"preset": "tiny-olmoe-1b-7b"}, LAYOUTS["fsdp2-tp"]),
    "head norms tp": ({"preset": "tiny-olmoe-1b-7b"}, {"tp": 2}),
    "batch balance ep": ({"moe": {"balance_scope": "batch"}}, {"dp_shard": 2, "ep": 2}),
    "latent tp": ({"preset": "tiny-deepseek-v2-lite"}, {"tp": 2}),
    "latent fsdp2-tp": ({"preset": "tiny-deepseek-v2-lite"}, LAYOUTS["fsdp2-tp"]),
    "latent tp-sp-lp": ({"preset": "tiny-deepseek-v2-lite"}, LAYOUTS["tp-sp-lp"]),
    "latent cp": ({"preset": "tiny-deepseek-v2-lite"}, {"cp": 2}),
    "latent fsdp2-ep": ({"preset": "tiny-deepseek-v3"}, {"dp_shard": 2, "ep": 2}),
    "fsdp2 recompute": ({}, {"dp_shard": 2, "micro_batches": 2, "recompute": True}),
    "deep pp-interleaved": (
        {"model": {"num_layers": 5}},
        {**LAYOUTS["pp-interleaved"], "stage_layers": (2, 1, 1, 1)},
    ),
    "fsdp1-replicas": ({}, {"dp_replicate": 2, "data_parallel": "fsdp1"}),
    "hsdp4-ep": ({}, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}),
    "tp4-ep2": ({}, {"tp": 4, "ep": 2}),
    "ddp-ep placed": ({}, {"dp_replicate": 2, "data_parallel": "ddp", "ep": 2, "placement": _PLACED}),
    "fsdp2-ep-pp placed": ({}, {**LAYOUTS["fsdp2-ep-pp"], "placement": _PLACED}),
    "long cp-alltoall": ({"data": _LONG}, LAYOUTS["cp-alltoall"]),
    "long tp-ep": ({"data": _LONG}, LAYOUTS["tp-ep"]),
    "mixed fsdp2-ep": ({"recipe": {"precision": "mixed"}}, LAYOUTS["fsdp2-ep"]),
    "bfloat16 ddp-ep": ({"recipe": {"precision": "bfloat16"}}, LAYOUTS["ddp-ep"]),
    "float8 fsdp2": ({"recipe": _FLOAT8}, LAYOUTS["fsdp2"]),
    "float8 pp": ({"recipe": _FLOAT8}, LAYOUTS["pp"]),
}

# Stacks and messages contain absolute paths, which depend on the machine.
_PARENT_FOLDER = f"{Path(__file__).resolve().parents[3]}/"

# Traits of cases other than mesh axes. Code that does not implement such a trait does not need it.
_SPECIAL = ("weight decay", "placement", "length", "precision")

MOST_LAYOUTS = 8
"""Maximum number of layouts under which a mutant runs before it counts as a survivor."""


@dataclass(frozen=True)
class MutationOptions:
    """Which mutants to run: `names`, or `number` of those that some layout executes, chosen by `seed`.

    `keep` is a file of earlier results, from which the run resumes; coverage is kept beside it. With
    `precision` all layouts compute in it, otherwise each in its own, mostly float64. With `escalates`, findings
    without a cause and passing mutants are run in wider precisions, as in `moeverify run`.
    """

    names: Sequence[str] = ()
    number: int = 60
    seed: int = 0
    keep: Path | None = None
    precision: Precision | None = None
    escalates: bool = True

    @property
    def keep_coverage(self) -> Path | None:
        """Return the file for coverage beside that of results, or None without `keep`."""
        return (
            None if self.keep is None else self.keep.with_name(f"{self.keep.stem}-coverage{self.keep.suffix}")
        )


@dataclass(frozen=True)
class RanMutants:
    """The rows of all requested mutants, and the environment of the run.

    `num_all` mutants exist, and no layout executes `num_unreached` of them. `left_out` names the layouts
    that do not support the requested precision.
    """

    rows: list[MutantRow]
    environment: dict[str, str]
    num_all: int
    num_unreached: int
    left_out: tuple[str, ...] = ()


def run_mutants(how: MutationOptions, options: RunOptions, on_event: OnEvent) -> RanMutants:
    """Measure the coverage of the layouts, and run each mutant.

    Raises: CaseError when a name is unknown, or when stored rows are from other code or another machine.
    """
    named = [find_mutant(name) for name in how.names]
    environment = describe_environment(choose_device(options.device))
    coverage = KeptRows(how.keep_coverage, environment, CoveredCode)
    # Coverage is the same in each precision; the findings of a mutant are not.
    setting = {"precision": how.precision or "", "escalates": str(how.escalates)}
    rows = KeptRows(how.keep, environment | setting, MutantRow)
    covered = measure_coverage(list(list_cases().values()), options, on_event, coverage)
    everything, cases = list_mutants(), list_cases_in(how.precision)
    reached = [mutant for mutant in everything if choose_layouts(mutant, covered)]
    chosen = named or choose_mutants(reached, how.number, how.seed)
    run = MutationRun(chosen, covered, rows, how.precision)
    found = run.execute(options, on_event, escalates=how.escalates)
    left_out = tuple(name for name in list_cases() if name not in cases)
    num_unreached = len(everything) - len(reached)
    return RanMutants(found, environment, len(everything), num_unreached, left_out)


@cache
def list_cases() -> Mapping[str, Case]:
    """Return the clean cases for mutants by name, mostly in float64."""
    plain = {name: make_case(name, **layout) for name, layout in LAYOUTS.items()}
    more = {name: make_case(name, **options, **layout) for name, (options, layout) in _MORE.items()}
    return {name: case for name, case in {**plain, **more}.items() if not list(validate(case))}


def list_cases_in(precision: Precision | None) -> Mapping[str, Case]:
    """Return the clean cases by name.

    With a precision, convert them and drop those that do not support it.
    """
    if precision is None:
        return list_cases()
    changed = {name: try_precision(case, precision) for name, case in list_cases().items()}
    return {name: case for name, case in changed.items() if case is not None}


def measure_coverage(
    cases: Sequence[Case],
    options: RunOptions,
    on_event: OnEvent,
    kept: KeptRows[CoveredCode],
) -> list[CoveredCode]:
    """Return the parallel code that each case executes. A case that does not pass counts as executing none.

    Cases in `kept` are not run again, and new rows are added to it.
    """
    files = tuple(dict.fromkeys(mutant.file for mutant in list_mutants()))
    left = [case for case in cases if case.name not in kept.rows]
    with scratch_folder() as folder:
        tasks = [_make_coverage_task(case, files, folder / str(number)) for number, case in enumerate(left)]
        folders = {task.case.name: folder / str(number) for number, task in enumerate(tasks)}

        def take(result: CaseResult) -> None:
            kept.add(_read_row(result, folders[result.name]))

        if tasks:
            logs = folder / "logs"
            logs.mkdir()
            plain = replace(options, require_goldens=False)
            run_case_tasks(tasks, plain, find_machine(plain), logs, pass_results(take, on_event))
    return [kept.rows[case.name] for case in cases if case.name in kept.rows]


def _make_coverage_task(case: Case, files: tuple[str, ...], folder: Path) -> CaseTask:
    folder.mkdir()
    return CaseTask(case, make=partial(CoverageJob, files=files, folder=folder))


def _read_row(result: CaseResult, folder: Path) -> CoveredCode:
    spans = read_spans(folder) if result.verdict == "pass" else {}
    found = {file: tuple(sorted(seen)) for file, seen in spans.items()}
    return CoveredCode(name=result.name, ranks=result.ranks, seconds=result.seconds, spans=found)


def choose_layouts(mutant: Mutant, covered: Sequence[CoveredCode]) -> list[str]:
    """Return the layouts under which a mutant runs until it is killed, in order.

    All of them execute the mutated code. The first layout is the smallest. Ties go to the layout with the
    fewest special traits, then to the one with the most axes that the mutated code serves. Code that serves
    every axis is tested best with data-parallel axes.

    Each further layout maximizes the number of newly covered branches of the mutant's function, then the
    number of new traits such as (axis, degree) pairs. A degree of 4 reveals errors that a degree of 2
    hides, because each of two ranks is both the next and the previous of the other. Narrow precisions come
    last, since float64 shows the same errors more exactly.
    """
    wanted = set(mutant.area.axes or DATA_AXES) | {"ep"}
    left = {
        row.name: _Choice(row, _list_traits(row.name), _list_branches(mutant, row))
        for row in covered
        if mutant.is_executed(row.spans.get(mutant.file, ()))
    }
    chosen: list[str] = []
    seen: set[tuple[str, object]] = set()
    taken: set[Span] = set()
    while left and len(chosen) < MOST_LAYOUTS:
        if not chosen:
            best = min(left.values(), key=lambda each: each.rank_first(wanted))
        else:
            new = [each for each in left.values() if each.branches - taken or each.traits - seen]
            if not new:
                break
            best = min(new, key=lambda each: each.rank_next(taken, seen))
        chosen.append(best.row.name)
        seen |= best.traits
        taken |= best.branches
        del left[best.row.name]
    return chosen


@dataclass(frozen=True)
class _Choice:
    """A layout that executes a mutant, with its traits and the covered branches of the mutated function."""

    row: CoveredCode
    traits: set[tuple[str, object]]
    branches: set[Span]

    def rank_first(self, wanted: set[str]) -> tuple[float, ...]:
        """Return the sort key for the first layout. The minimum is chosen."""
        count = sum(axis in wanted for axis, _ in self.traits)
        num_special = sum(name in _SPECIAL for name, _ in self.traits)
        return self._is_narrow, self.row.ranks, num_special, -count, self.row.seconds

    def rank_next(self, taken: set[Span], seen: set[tuple[str, object]]) -> tuple[float, ...]:
        """Return the sort key for the remaining layouts, given the branches and traits already covered."""
        new = self.traits - seen
        return self._is_narrow, -len(self.branches - taken), -len(new), self.row.ranks, self.row.seconds

    @property
    def _is_narrow(self) -> bool:
        return list_cases()[self.row.name].recipe.precision != "float64"


def _list_traits(name: str) -> set[tuple[str, object]]:
    """Return the traits of a case: axes with their degrees, micro-batches, and other features."""
    case = list_cases()[name]
    layout, recipe = case.layout, case.recipe
    found: set[tuple[str, object]] = {
        (axis, degree) for axis, degree in list_degrees(case).items() if axis != TOP_K
    }
    others = (
        bool(recipe.optimizer.weight_decay),
        is_placed(layout),
        recipe.data.seq_len > 256,
        recipe.precision != "float64" and (recipe.precision, recipe.float8),
        count_stages(layout) // layout.pp - 1,
        layout.data_parallel == "fsdp1",
        recipe.model.reference is not None and recipe.model.reference.num_layers > 4,
        recipe.model.reference is not None
        and recipe.model.reference.tie_embedding
        and len(set(end_ranks(layout))) > 1,
    )
    names = (*_SPECIAL, "stages of a rank", "flat shards", "many layers", "tied ends")
    return found | {(name, value) for name, value in zip(names, others, strict=True) if value}


def _list_branches(mutant: Mutant, row: CoveredCode) -> set[Span]:
    """Return the spans of the mutated function that a layout executes."""
    first, last = mutant.function_lines
    return {span for span in row.spans.get(mutant.file, ()) if first <= span[0] and span[2] <= last}


class MutationRun:
    """A run of mutants that are still undecided, with the layouts for each."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        covered: Sequence[CoveredCode],
        kept: KeptRows[MutantRow],
        precision: Precision | None = None,
    ) -> None:
        self._mutants = {mutant.name: mutant for mutant in mutants}
        self._precision = precision
        self._cases = list_cases_in(precision)
        self._kept = kept
        self._tried: dict[str, list[str]] = {name: [] for name in self._mutants}
        known = [row for row in covered if row.name in self._cases]
        self._layouts = {name: choose_layouts(mutant, known) for name, mutant in self._mutants.items()}

    def execute(self, options: RunOptions, on_event: OnEvent, *, escalates: bool = False) -> list[MutantRow]:
        """Run until every mutant is decided, and return one row per mutant, in order.

        One launch runs many mutants. A mutant that crashes or hangs ends the launch, and the others
        continue in a new one.
        """
        rows = self._kept.rows
        for name, mutant in self._mutants.items():
            if name in rows:
                continue
            if self._precision is not None and not mutant.is_bug_in(self._precision):
                self._kept.add(self._make_row(name, "no bug"))
            elif not self._layouts[name]:
                self._kept.add(self._make_row(name, "not executed"))
        for turn in range(MOST_LAYOUTS):
            waiting = [name for name in self._mutants if name not in rows and len(self._layouts[name]) > turn]
            # Sort by size, because a launch has as many ranks as its largest case.
            waiting.sort(key=lambda name: self._cases[self._layouts[name][turn]].layout.world_size)
            if waiting:
                self._run_turn(waiting, turn, options, on_event, escalates=escalates)
        return [rows[name] for name in self._mutants if name in rows]

    def _run_turn(
        self, names: Sequence[str], turn: int, options: RunOptions, on_event: OnEvent, *, escalates: bool
    ) -> None:
        cases = {f"{name} @ {self._layouts[name][turn]}": name for name in names}
        made = [
            self._cases[self._layouts[name][turn]].model_copy(update={"name": title})
            for title, name in cases.items()
        ]
        faults = {title: self._mutants[name].target for title, name in cases.items()}
        open_ones: list[str] = []  # results that wider precisions will be run for
        confirming = find_confirming(made, ()) if escalates else {}

        def take(result: CaseResult) -> None:
            name = cases[result.name]
            self._tried[name].append(self._layouts[name][turn])
            passes = result.verdict == "pass" and result.name in confirming
            if escalates and (passes or needs_escalation(result)):
                open_ones.append(result.name)
            else:
                self._take(name, result)

        options = replace(options, require_goldens=False, case_faults=faults)
        result = run_cases(made, options, pass_results(take, on_event))
        if open_ones and result is not None:
            result = escalate(made, result, options, on_event, confirming=confirming)
            for each in result.cases:
                if each.name in open_ones:
                    self._take(cases[each.name], each)

    def _take(self, name: str, result: CaseResult) -> None:
        """Record the result of a mutant under one layout. A pass is final only if no layout is left."""
        if result.verdict == "pass" and len(self._tried[name]) < len(self._layouts[name]):
            return
        self._kept.add(self._make_row(name, _decide(name, result), result))

    def _make_row(self, name: str, outcome: Outcome, result: CaseResult | None = None) -> MutantRow:
        mutant = self._mutants[name]
        row = MutantRow(
            name=name,
            operator=mutant.operator,
            file=mutant.file,
            line=mutant.line,
            before=mutant.before,
            after=mutant.after,
            cases=tuple(self._tried[name]),
            outcome=outcome,
        )
        if result is None:
            return row
        first = result.lead
        return row.model_copy(
            update={
                "finding": first,
                "said": _without_folder(describe_cause(first)) if first is not None else "",
                "loss_curve": outcome == "detected" and sees_loss_curve(result),
                "loss_and_norm": outcome == "detected" and sees_loss_and_norm(result),
                "reason": _without_folder(result.reason),
                "seconds": result.seconds,
            }
        )


def _without_folder(text: str) -> str:
    return text.replace(_PARENT_FOLDER, "")


def _decide(name: str, result: CaseResult) -> Outcome:
    if result.verdict == "mismatch":
        return "detected"
    if result.verdict == "pass":
        return "equivalent" if name in EQUIVALENT else "survived"
    if result.verdict == "skipped":
        return "not run"
    states = {report.state for report in result.rank_reports}
    return "hung" if states and states <= {"hung", "lost", "stopped"} else "crashed"
