"""Check the modules of a user's model in a narrow precision, one by one, on the inputs that a rank had.

In bfloat16 the rounding of a whole network hides errors of single tensors. This check replays the first
micro-batch of each block, and of each module in it, with one device's module (`module_replay`). So the bound
of an output, and of the gradient of an input, is the rounding of one module, whatever came before it.

A module that one device does not reproduce either is left out: it may draw random numbers, or add to a loss
that is no output. Modules that cannot be replayed under the layout are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from moeverify.cases.schema import Recipe
from moeverify.results.checks import CheckName
from moeverify.results.facts import ReplayedModules, Use
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.train.assemble import assemble_single
from moeverify.train.custom_subject import CustomSubject
from moeverify.train.program import Program, compute_dtype_of
from moeverify.verification.checks.base import Check, Outcome, RankRun, Role, Shown, Watch, rate_error
from moeverify.verification.checks.bounds import FLOOR
from moeverify.verification.checks.forced_blocks import place_finding
from moeverify.verification.checks.module_replay import Obstacle, Replayed, Visits, choose_modules, replay
from moeverify.verification.compare.assembled import Key

PRECISIONS = ("bfloat16", "mixed")

_UNDER_CP = "has positions of other ranks"


@dataclass(frozen=True)
class ModuleReport:
    """Replayed modules of one rank, and the reasons why others were not replayed, by module."""

    replayed: tuple[Replayed, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


class ModulesWatch(Watch[ModuleReport]):
    """Keeps the first call of each module in the first step, and replays it after the run.

    `left_out` are modules that are not replayed, with reasons. `alone` is the context of the replay: one
    device's modules must not see the other ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        program: Program,
        left_out: Mapping[str, str],
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        share = program.share.micro_batches(program.num_micro_batches)[0]
        self._tokens = len(share.rows), len(share.positions)
        self._recipe, self._device = recipe, program.device
        self._left_out = left_out
        self._alone = alone
        modules = choose_modules(program.model)
        self._visits = Visits({name: each for name, each in modules.items() if name not in left_out})
        self._is_begun = False

    def begin_step(self, step: int) -> None:
        """Watch the first step only; see `Watch`."""
        if self._is_begun:
            self._visits.close()
        self._is_begun = True

    def close(self) -> None:
        """Release the model; see `Watch`."""
        self._visits.close()

    def report(self) -> ModuleReport:
        """Replay the modules; see `Watch`."""
        with self._alone():
            return self._replay()

    def _replay(self) -> ModuleReport:
        narrow = assemble_single(self._recipe, self._device)
        wide = assemble_single(self._recipe, self._device, compute="float64")
        dtype = compute_dtype_of(self._recipe.precision)
        for parameter in narrow.model.parameters():
            parameter.data = parameter.data.to(dtype)
        narrow_modules, wide_modules = choose_modules(narrow.model), choose_modules(wide.model)
        left_out = dict(self._left_out)
        found: list[Replayed] = []
        for name, (visit, *_) in self._visits.found.items():
            if name not in wide_modules:
                left_out[name] = "is on no single device"
                continue
            try:
                with narrow.subject.surround():
                    unit = torch.finfo(dtype).eps
                    found += replay(name, visit, narrow_modules[name], wide_modules[name], self._tokens, unit)
            except Obstacle as obstacle:
                left_out[name] = str(obstacle)
        return ModuleReport(tuple(found), left_out)


def list_unreproduced(
    recipe: Recipe, device: torch.device, train: Callable[[Program, Watch[ModuleReport]], object]
) -> dict[str, str]:
    """Return the modules whose results one device does not reproduce in the precision of the recipe.

    The value is the obstacle, or empty if the results differ. `train(program, watch)` trains the first step.
    """
    if not applies(recipe):
        return {}
    program = assemble_single(recipe, device)
    watch = ModulesWatch(recipe, program, {})
    train(program, watch)
    report = watch.report()
    wrong = {each.module for each in report.replayed if not each.error <= _bound_of(recipe, each)}
    return {**report.left_out, **dict.fromkeys(sorted(wrong), "")}


def applies(recipe: Recipe) -> bool:
    """Return whether modules are replayed: those of a user's model in a precision of 16 bits."""
    return recipe.model.reference is None and recipe.precision in PRECISIONS and recipe.float8 == "none"


def _bound_of(recipe: Recipe, replayed: Replayed, factor: float = 1.0) -> float:
    return max(factor * replayed.rounding, FLOOR[recipe.precision])


class Modules(Check[ModuleReport]):
    """Outputs of modules and gradients of their inputs, against one device's modules on the same inputs."""

    name = CheckName.MODULES
    role = Role.ORIGIN
    sees_inside = True

    def watch(self, run: RankRun, program: Program) -> Watch[ModuleReport] | None:
        """Return a watch that replays modules; None where the check does not apply; see `Check`."""
        layout = run.case.layout
        is_own = isinstance(program.subject, CustomSubject)
        if not is_own or not applies(run.case.recipe) or layout.compile != "none":
            return None
        skipped = {name: why for (use, name, _), why in run.dtypes.items() if use == Use.UNREPRODUCED}
        if layout.cp > 1:
            skipped |= dict.fromkeys(choose_modules(program.model), _UNDER_CP)
        return ModulesWatch(run.case.recipe, program, skipped, run.alone)

    def judge(self, shown: Shown, reports: Sequence[ModuleReport]) -> Outcome | None:
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
        worst: tuple[float, Worst] | None = None
        for (module, end), found in rows.items():
            bounds = [_bound_of(recipe, each, factor) for _, each in found]
            ratios = [rate_error(each.error) / bound for (_, each), bound in zip(found, bounds, strict=True)]
            at = max(range(len(found)), key=ratios.__getitem__)
            rank, each = found[at]
            tensor = f"{module} {end}"
            limits[0, CheckName.MODULES, tensor] = max(bounds)
            if worst is None or ratios[at] > worst[0]:
                worst = ratios[at], Worst(tensor=tensor, error=each.error, bound=bounds[at], step=0)
            if not ratios[at] <= 1.0:
                wrong = tuple(
                    other for (other, _), ratio in zip(found, ratios, strict=True) if not ratio <= 1.0
                )
                findings.append(_make_finding(shown, tensor, wrong, rank, each.error, bounds[at]))
        result = CheckResult(
            name=CheckName.MODULES,
            verdict="mismatch" if findings else "pass",
            tensors=len(rows),
            worst=worst[1] if worst else None,
            facts=_describe(reports, {module for module, _ in rows}),
        )
        return Outcome(result, tuple(_follow(each, findings) for each in findings), limits)


def _make_finding(
    shown: Shown, tensor: str, ranks: tuple[int, ...], rank: int, error: float, bound: float
) -> Finding:
    return place_finding(
        Finding(
            check=CheckName.MODULES,
            kind=CheckName.MODULES,
            tensor=tensor,
            step=0,
            rank=rank,
            ranks=ranks,
            coordinates=shown.place(rank),
            error=rate_error(error),
            bound=bound,
        )
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
        num_replayed=len(replayed), left_out={reason: tuple(found) for reason, found in left_out.items()}
    )


CHECKS = (Modules(),)
