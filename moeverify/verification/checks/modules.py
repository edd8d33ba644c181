"""Check the modules of a user's model in a narrow precision, one by one, on the inputs that a rank had.

In bfloat16 the rounding of a whole network hides errors of single tensors. This check replays the first
micro-batch of each block, and of each module in it, with one device's module (`module_replay`). So the bound
of an output, and of the gradient of an input, is the rounding of one module, whatever came before it.

A module that one device does not reproduce either is left out: it may draw random numbers, or add to a loss
that is no output. Modules that cannot be replayed under the layout are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moeverify.cases.schema import Recipe
from moeverify.parallel.regions.region import Region
from moeverify.results.checks import CheckName, Kind
from moeverify.results.facts import DtypeUse, ReplayedModules
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.place import Place, Stage
from moeverify.train.assemble import assemble_single
from moeverify.train.custom_subject import CustomSubject
from moeverify.train.program import NearTieCounts, TrainingProgram, compute_dtype_of
from moeverify.verification.checks.base import (
    Check,
    CheckOutcome,
    RankRun,
    Role,
    ShownTensors,
    Watch,
    rate_error,
)
from moeverify.verification.checks.bounds import FLOOR, Parts
from moeverify.verification.checks.forced_blocks import place_finding
from moeverify.verification.checks.module_gradients import (
    Held,
    StepSums,
    SumComparison,
    compare_sums,
    find_owners,
    hold,
    sum_calls,
)
from moeverify.verification.checks.module_replay import (
    MOST_ROUNDING,
    KeptCalls,
    ModuleCall,
    Obstacle,
    Replayed,
    choose_modules,
    mixes_positions,
    replay,
)
from moeverify.verification.compare.assembled import Key
from moeverify.verification.compare.gather import gather_on_all

PRECISIONS = ("bfloat16", "mixed")

MOST_STATE = 1 << 24
"""Maximum number of elements of weights that are kept for all steps together."""

_UNDER_CP = "has positions of other ranks"


@dataclass(frozen=True)
class ModuleReport:
    """Replayed modules of one rank, the reasons why others were not replayed, and its part of gradients.

    `left_out` is by module. `sums` has one entry for each step whose weights are known. `near_ties` counts the
    choices of the whole run.
    """

    replayed: tuple[Replayed, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    sums: tuple[StepSums, ...] = ()
    near_ties: NearTieCounts = field(default_factory=NearTieCounts)


State = list[tuple[str, Tensor, Region]]


class ModulesWatch(Watch[ModuleReport]):
    """Keeps the calls of modules, and replays them after the run.

    `left_out` are modules that are not replayed, with reasons, and `unsummed` are parameters whose gradients are
    not summed again. `calls` has the number of calls in a micro-batch of modules that are not called once. A
    module with another number of calls is not summed: a pipeline may call it to infer shapes, which adds nothing
    to gradients. `alone` is the context of the replay: one device's modules must not see the other ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        program: TrainingProgram,
        left_out: Mapping[str, str],
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
        unsummed: Collection[str] = (),
        calls: Mapping[str, int] | None = None,
        *,
        counts_calls: bool = True,
    ) -> None:
        share = program.share.micro_batches(program.num_micro_batches)[0]
        self._tokens = len(share.rows), len(share.positions)
        self._share = repr(program.share)
        self._scale, self._near_ties = program.scale, program.near_ties
        self._recipe, self._device = recipe, program.device
        self._unit = torch.finfo(compute_dtype_of(recipe.precision)).eps
        self._left_out, self._unsummed = left_out, unsummed
        self._counts_calls = counts_calls
        self._calls, self._num_micro_batches = calls or {}, program.num_micro_batches
        self._alone = alone
        modules = choose_modules(program.model)
        self._kept = KeptCalls({name: each for name, each in modules.items() if name not in left_out})
        self._is_scaled = program.custom_step is not None
        self._normed: set[int] = set()  # steps that show their gradient norm
        size = sum(torch.Size(shard.region.shape).numel() for shard in program.live_shards())
        self._num_kept = recipe.steps if size * recipe.steps <= MOST_STATE else 1
        self._steps: list[dict[str, list[ModuleCall]]] = []
        self._held: list[dict[str, list[Held]]] = []
        self._states: list[State] = []  # after each step but the last one

    def begin_step(self, step: int) -> None:
        """Begin the calls of the next step; see `Watch`."""
        self._end_step()
        self._held.append({})
        self._states.append([])
        if len(self._held) > self._num_kept:
            self._kept.close()

    def _end_step(self) -> None:
        if len(self._steps) < len(self._held):
            self._steps.append(self._kept.take())

    def observe(self, step: int, kind: str, name: str, local: Tensor | None, region: Region) -> None:
        """Keep the state after a step, and the sampled elements of a gradient; see `Watch`."""
        if local is None or not 0 <= step < self._num_kept:
            return
        if kind == Kind.GRADIENT and name not in self._unsummed:
            self._held[-1].setdefault(name, []).append(hold(local, region))
        elif kind == Kind.GRADIENT_NORM:
            self._normed.add(step)
        elif kind in (Kind.WEIGHT, Kind.BUFFER) and step < self._num_kept - 1:
            self._states[-1].append((name, local.detach().to("cpu", copy=True), region))

    def close(self) -> None:
        """Release the model; see `Watch`."""
        self._end_step()
        self._kept.close()

    def count_calls(self) -> dict[str, int]:
        """Return the number of calls in a micro-batch, of modules that are not called once."""
        counts = {name: len(calls) // self._num_micro_batches for name, calls in self._steps[0].items()}
        return {name: count for name, count in counts.items() if count != 1}

    def list_mixing(self) -> list[str]:
        """Return the modules that mix positions, on one device after its run."""
        one = assemble_single(self._recipe, self._device)
        modules, unit = choose_modules(one.model), self._unit
        with one.subject.surround():
            return [
                name
                for name, (call, *_) in self._steps[0].items()
                if mixes_positions(call, modules[name], self._tokens, unit)
            ]

    def report(self) -> ModuleReport:
        """Replay the modules; see `Watch`."""
        states = gather_on_all(self._states)
        with self._alone():
            return self._replay(states)

    def _replay(self, states: Sequence[Sequence[State]]) -> ModuleReport:
        narrow = assemble_single(self._recipe, self._device)
        wide = assemble_single(self._recipe, self._device, compute="float64")
        modules = {
            name: (each, wide_each)
            for (name, each), wide_each in zip(
                choose_modules(narrow.model).items(), choose_modules(wide.model).values(), strict=True
            )
        }
        left_out, unit = dict(self._left_out), self._unit
        found: list[Replayed] = []
        sums: list[StepSums] = []
        owners = find_owners(narrow.model, {name: each for name, (each, _) in modules.items()})
        owners = {name: each for name, each in owners.items() if name not in self._unsummed}
        with narrow.subject.surround():
            for name, calls in (self._steps[0] if self._steps else {}).items():
                if name not in modules:
                    left_out[name] = "is on no single device"
                    continue
                try:
                    found += replay(name, calls[0], *modules[name], self._tokens, unit)
                except Obstacle as obstacle:
                    left_out[name] = str(obstacle)
            for step in range(min(self._num_kept, len(self._steps))):
                if step > 0:
                    for program in (narrow, wide):
                        _load_state(program, [each for of_rank in states for each in of_rank[step - 1]])
                sums.append(self._sum_step(step, narrow, modules, owners, unit))
        return ModuleReport(tuple(found), left_out, tuple(sums), self._near_ties)

    def _sum_step(
        self,
        step: int,
        narrow: TrainingProgram,
        modules: Mapping[str, tuple[nn.Module, nn.Module]],
        owners: Mapping[str, tuple[str, ...]],
        unit: float,
    ) -> StepSums:
        """Return this rank's part of the gradients of a step, from one device's modules with its weights."""
        names = {id(each): name for name, each in narrow.model.named_parameters() if name in owners}
        sums = StepSums(self._share, self._is_scaled, held=self._held[step], owners=owners)
        if self._is_scaled and step not in self._normed:
            return StepSums(self._share)
        for module, calls in self._steps[step].items():
            num_calls = self._calls.get(module, 1) * self._num_micro_batches
            if module not in modules or (self._counts_calls and len(calls) != num_calls):
                continue
            inner = {
                name: names[id(each)]
                for name, each in modules[module][0].named_parameters()
                if id(each) in names
            }
            try:
                added = sum_calls(calls, *modules[module], inner, self._tokens, unit) if inner else {}
            except Obstacle:
                continue
            for name, each in added.items():
                sums.added.setdefault(name, {})[module] = each.divide(self._scale)
        return sums


@torch.no_grad()
def _load_state(program: TrainingProgram, shown: State) -> None:
    """Overwrite the weights and buffers of one device with the assembled ones of all ranks."""
    known = {shard.name: shard for shard in (*program.shards, *program.buffers)}
    for name, local, region in shown:
        if name in known:
            target = known[name].local()
            whole = target.to("cpu", copy=True)
            region.put(whole, local.to(whole.dtype).reshape(region.local_shape))
            target.copy_(whole)


def list_unreproduced(
    recipe: Recipe, device: torch.device, train: Callable[[TrainingProgram, Watch[ModuleReport]], object]
) -> dict[tuple[str, str], str]:
    """Return modules and gradients that one device does not reproduce in the precision of the recipe.

    The keys are (module, "") and, for the gradient of a parameter, (parameter, "gradient"). The value is the
    obstacle, or empty if the results differ. The keys (module, "positions") are of modules that mix positions,
    which ranks of context parallelism cannot replay; (module, "calls") has the number of calls in a micro-batch if
    that is not one. `train(program, watch)` trains the first steps.
    """
    if not applies(recipe):
        return {}
    program = assemble_single(recipe, device)
    watch = ModulesWatch(recipe, program, {}, counts_calls=False)
    train(program, watch)
    found = {(name, "positions"): "" for name in watch.list_mixing()}
    found |= {(name, "calls"): str(count) for name, count in watch.count_calls().items()}
    report = watch.report()
    wrong = {each.module for each in report.replayed if not each.error <= _bound_of(recipe, each)}
    found |= {(name, ""): why for name, why in report.left_out.items()}
    found |= dict.fromkeys(((name, "") for name in sorted(wrong)), "")
    for step in report.sums:
        compared = compare_sums([step])
        for name in step.held:
            if name not in compared or not compared[name].error <= _bound_of(recipe, compared[name], 2.0):
                found[name, "gradient"] = ""
    return found


def applies(recipe: Recipe) -> bool:
    """Return whether the check applies: to a user's model in a precision of 16 bits."""
    return recipe.model.reference is None and recipe.precision in PRECISIONS and recipe.float8 == "none"


def _bound_of(recipe: Recipe, replayed: Replayed | SumComparison, factor: float = 1.0) -> float:
    return max(_list_parts(recipe, replayed, factor).values())


def _list_parts(recipe: Recipe, replayed: Replayed | SumComparison, factor: float) -> Parts:
    return {"module": factor * replayed.rounding, "floor": FLOOR[recipe.precision]}


class ModuleAgreement(Check[ModuleReport]):
    """Outputs of modules and gradients of their inputs, against one device's modules on the same inputs."""

    name = CheckName.MODULES
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: TrainingProgram) -> Watch[ModuleReport] | None:
        """Return a watch that replays modules; None where the check does not apply; see `Check`."""
        layout = run.case.layout
        is_own = isinstance(program.subject, CustomSubject)
        if not is_own or not applies(run.case.recipe) or layout.compile != "none":
            return None
        unreproduced = {
            (name, part): why for (use, name, part), why in run.dtypes.items() if use == DtypeUse.UNREPRODUCED
        }
        skipped = {name: why for (name, part), why in unreproduced.items() if not part}
        calls = {name: int(why) for (name, part), why in unreproduced.items() if part == "calls"}
        unsummed = [name for name, part in unreproduced if part == "gradient"]
        if layout.cp > 1:
            skipped |= {name: _UNDER_CP for name, part in unreproduced if part == "positions"}
        return ModulesWatch(run.case.recipe, program, skipped, run.alone, unsummed, calls)

    def judge(self, shown: ShownTensors, reports: Sequence[ModuleReport]) -> CheckOutcome | None:
        """Return the verdict. An error in a module follows an error in one of its members; see `Check`."""
        if not reports:
            return None
        factor = shown.bounds.tolerance.factor
        recipe = shown.case.recipe
        rows: dict[tuple[str, str], list[tuple[int, Replayed]]] = {}
        for rank, report in enumerate(reports):
            for each in report.replayed:
                rows.setdefault((each.module, each.end), []).append((rank, each))
        findings: list[Finding] = []
        limits: dict[Key, float] = {}
        parts: dict[Key, Parts] = {}
        errors: dict[Key, float] = {}
        worst: tuple[float, Worst] | None = None
        for (module, end), found in rows.items():
            bounds = [_bound_of(recipe, each, factor) for _, each in found]
            ratios = [rate_error(each.error) / bound for (_, each), bound in zip(found, bounds, strict=True)]
            at = max(range(len(found)), key=ratios.__getitem__)
            rank, each = found[at]
            tensor = f"{module} {end}"
            key: Key = (0, CheckName.MODULES, tensor)
            limits[key], errors[key] = max(bounds), rate_error(each.error)
            parts[key] = _list_parts(recipe, max(found, key=lambda one: one[1].rounding)[1], factor)
            if worst is None or ratios[at] > worst[0]:
                worst = ratios[at], Worst(tensor=tensor, error=each.error, bound=bounds[at], step=0)
            if not ratios[at] <= 1.0:
                wrong = tuple(
                    other for (other, _), ratio in zip(found, ratios, strict=True) if not ratio <= 1.0
                )
                findings.append(_make_finding(shown, tensor, wrong, rank, each.error, bounds[at]))
        for key, summed in _compare_steps(reports):
            bound = _bound_of(recipe, summed, factor)
            if summed.rounding > MOST_ROUNDING:
                continue
            limits[key], errors[key] = bound, rate_error(summed.error)
            parts[key] = _list_parts(recipe, summed, factor)
            ratio = rate_error(summed.error) / bound
            if worst is None or ratio > worst[0]:
                worst = ratio, Worst(tensor=key[2], error=summed.error, bound=bound, step=key[0])
            if not ratio <= 1.0:
                findings.append(_make_gradient_finding(shown, key, summed, bound))
        result = CheckResult(
            name=CheckName.MODULES,
            verdict="mismatch" if findings else "pass",
            tensors=len(limits),
            worst=worst[1] if worst else None,
            facts=_describe(reports, {module for module, _ in rows}),
        )
        followed = tuple(_follow(each, findings) for each in findings)
        return CheckOutcome(result, followed, limits, parts=parts, errors=errors)


def _make_finding(
    shown: ShownTensors, tensor: str, ranks: tuple[int, ...], rank: int, error: float, bound: float
) -> Finding:
    key = (0, CheckName.MODULES, tensor)
    found = shown.make_finding(CheckName.MODULES, key, ranks, rank=rank, error=rate_error(error), bound=bound)
    return place_finding(found)


def _compare_steps(reports: Sequence[ModuleReport]) -> Iterator[tuple[Key, SumComparison]]:
    for step in range(min(len(report.sums) for report in reports)):
        compared = compare_sums([report.sums[step] for report in reports])
        yield from (((step, Kind.GRADIENT, name), summed) for name, summed in compared.items())


def _make_gradient_finding(shown: ShownTensors, key: Key, summed: SumComparison, bound: float) -> Finding:
    return shown.make_finding(
        CheckName.MODULES,
        key,
        summed.ranks,
        rank=summed.rank,
        error=rate_error(summed.error),
        bound=bound,
        place=Place(module=key[2].rpartition(".")[0], ranks=summed.ranks, stage=Stage.BACKWARD),
    )


def _follow(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """Return a finding that follows the first error of a module inside of its own, if there is one."""
    module = finding.tensor.partition(" ")[0]
    inner = [each for each in findings if each.tensor.startswith(f"{module}.")]
    return finding.model_copy(update={"follows": inner[0].tensor}) if inner else finding


def _describe(reports: Sequence[ModuleReport], replayed: set[str]) -> ReplayedModules:
    left_out: dict[str, list[str]] = {}
    for name, reason in sorted({item for report in reports for item in report.left_out.items()}):
        if name not in replayed and name not in left_out.get(reason, ()):
            left_out.setdefault(reason, []).append(name)
    return ReplayedModules(
        num_replayed=len(replayed),
        left_out={reason: tuple(found) for reason, found in left_out.items()},
        num_near_ties=sum(report.near_ties.num_rows for report in reports),
        num_held=sum(report.near_ties.num_changed for report in reports),
    )


CHECKS = (ModuleAgreement(),)
