"""What the controller asks of the ranks, and what rank 0 answers: all that crosses the border of processes. No torch.

A job travels as JSON in the payload of `moeverify.launch.plan.Job`, its result as JSON in the outcome. Rank 0 answers
with the result of the job's kind, or refuses for a reason that the user can mend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from moeverify.case.schema import Case, Recipe
from moeverify.results.collective_run import RankValues, Transfer
from moeverify.results.error_map import ErrorMap
from moeverify.results.facts import CollectiveFacts
from moeverify.results.finding import CheckResult, Finding
from moeverify.results.load import ExpertLoad
from moeverify.results.measurement import Measurement
from moeverify.results.observation import Direction, End
from moeverify.results.probe import Answer
from moeverify.results.record import Record
from moeverify.results.route import RouteResult
from moeverify.results.timeline import Timeline

WORKER = "moeverify.worker.main"
"""The module that the ranks of all of these jobs run."""

PROBE_WORKER = "moeverify.worker.probes.main"
"""The module that the ranks of `ProbeJob` run: it imports as little as it can, since it looks for what is broken."""

COLLECTIVE_WORKER = "moeverify.worker.collective"
"""The module that the ranks of `CollectiveJob` run: it imports as little as it can, since somebody waits for it."""


class GoldenOrder(Record):
    """One full golden to have: of a recipe, with what optional checks look at.

    `folder` is where it is kept, without the class of device, which only a rank knows; `fresh` makes it anew.
    Units: `timeout` in seconds, for this golden alone; None leaves it to the limit of the job.
    """

    recipe: Recipe
    also: tuple[str, ...] = ()
    folder: Path
    fresh: bool = False
    timeout: float | None = None
    search_path: tuple[str, ...] = ()


class GoldenJob(Record):
    """Make the goldens that are not kept yet, side by side on the ranks."""

    kind: Literal["goldens"] = "goldens"
    orders: tuple[GoldenOrder, ...]


class CaseFields(Record):
    """The fields of every job that runs a case on the ranks of its layout; `golden` is the folder of its order.

    `operators` is the file for the operators of both sides in the step where something differs first, if they are to
    be kept. Hypotheses of the names `without` are not tried. Units: `explain_seconds` in seconds, for the search for
    what makes results wrong; 0 leaves it out.
    """

    case: Case
    golden: Path
    fault: str | None = None
    search_path: tuple[str, ...] = ()
    explain_seconds: float = 60.0
    operators: Path | None = None
    without: tuple[str, ...] = ()


class VerifyJob(CaseFields):
    """Train the case and compare it with its golden."""

    kind: Literal["verify"] = "verify"

    @property
    def builds_all_meshes(self) -> bool:
        """Return whether our code and torch's eager one alone use meshes: no user's, no fault's, no compiler's."""
        recipe, layout = self.case.recipe, self.case.layout
        is_eager = layout.compile == "none" and layout.graphs == "none"
        is_ours = recipe.model.reference is not None and layout.parallelize is None and recipe.step is None
        return is_ours and is_eager and recipe.float8 == "none" and self.fault is None


class SaveJob(CaseFields):
    """Train the case, and save its state to a folder on the way."""

    kind: Literal["save"] = "save"
    checkpoint: Path


class LoadJob(CaseFields):
    """Load what another case has saved, compare it, and train on."""

    kind: Literal["load"] = "load"
    checkpoint: Path


class CoverageJob(CaseFields):
    """Verify the case, and write what of these files each rank has executed to a folder that is there."""

    kind: Literal["coverage"] = "coverage"
    files: tuple[str, ...]
    folder: Path


class BlamedPlace(Record):
    """The place that the cause of a finding names: the call of a module.

    It is inside `module`, forward or backward, in one micro-batch: where its output is complete, or with `inner`
    where that module takes its input or gets its gradient.
    """

    about: str
    direction: Direction = "forward"
    module: str = ""
    inner: str = ""
    micro_batch: int = 0

    @property
    def reading(self) -> str:
        """Return the module at whose end ranks first differ from one device, or nothing."""
        return self.inner or self.module

    @property
    def end(self) -> End:
        """Return the end of that module: what it makes, or what comes to an inner one."""
        return "output" if (self.direction == "forward") == (not self.inner) else "input"


class DifferingCollective(Record):
    """The first collective that the ranks of a group do not issue alike, as a case has issued it before."""

    about: str
    facts: CollectiveFacts


class StopPoint(Record):
    """Where ranks stop in the debugger: when they have made a logical tensor, named as a finding names it.

    A rank that comes to the `place` that the cause names stops there instead. Where ranks issue different collectives
    they stop before the first of them, and there is no tensor.
    """

    kind: str
    tensor: str
    step: int
    about: str
    place: BlamedPlace | None = None
    collective: DifferingCollective | None = None


class DebugJob(CaseFields):
    """Train the case as far as a finding, and stop the ranks there in `multiprocessing_pdb`."""

    kind: Literal["debug"] = "debug"
    at: StopPoint


CaseJob = VerifyJob | SaveJob | LoadJob | CoverageJob | DebugJob


class BenchJob(Record):
    """Measure what a step of the case costs; `profile` keeps the traces of a step."""

    kind: Literal["bench"] = "bench"
    case: Case
    warmup: int
    steps: int
    profile: Path | None = None
    search_path: tuple[str, ...] = ()


class ProbeJob(Record):
    """Try one thing that a machine may get wrong."""

    kind: Literal["probe"] = "probe"
    probe: str


class CollectiveJob(Record):
    """Run one collective, and its backward where that is asked for, with the inputs that `transfer` has."""

    kind: Literal["collective"] = "collective"
    transfer: Transfer
    backward: bool


class RouteJob(Record):
    """Follow the tokens of one batch through a MoE layer of the case, and show `num_shown` of each rank."""

    kind: Literal["route"] = "route"
    case: Case
    layer: int
    step: int
    num_shown: int
    fault: str | None = None
    search_path: tuple[str, ...] = ()


RankJob = Annotated[
    VerifyJob
    | GoldenJob
    | SaveJob
    | LoadJob
    | CoverageJob
    | DebugJob
    | BenchJob
    | ProbeJob
    | CollectiveJob
    | RouteJob,
    Field(discriminator="kind"),
]


class Refusal(Record):
    """Why there is no result: something that the user can mend, known on every rank."""

    kind: Literal["refusal"] = "refusal"
    error: str


class VerifyResult(Record):
    """What the checks of a case say.

    `losses` has (golden, layout) total loss of each step, `gradient_norms` the norms of all gradients and
    `learning_rates` the optimizer's rates likewise, and `load` what each expert has computed. Where something
    differs, `errors` are those of all tensors, `timeline` has the collectives of the step where it began, and
    `operators` is the file with the operators of that step, if they were to be kept.
    """

    kind: Literal["verify"] = "verify"
    checks: tuple[CheckResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    losses: tuple[tuple[float, float], ...] = ()
    load: ExpertLoad | None = None
    gradient_norms: tuple[tuple[float, float], ...] = ()
    learning_rates: tuple[tuple[float, float], ...] = ()
    errors: tuple[ErrorMap, ...] = ()
    timeline: Timeline | None = None
    operators: str = ""


class GoldenSummary(Record):
    """What the file in git holds of a golden: losses and norms of every step, fingerprints of logical tensors.

    `damage` says what was wrong with the full golden in the cache that this one replaces. `seconds` is how long it
    took to make, with its noise; None where it was kept from an earlier run.
    """

    losses: dict[str, float]
    tensors: dict[str, list[float] | str]
    damage: str = ""
    seconds: float | None = None


class GoldenResult(Record):
    """The summary of each golden in the order of the job, or why it could not be made; on which class of device."""

    kind: Literal["goldens"] = "goldens"
    device_class: str
    goldens: tuple[GoldenSummary | Refusal, ...]


class BenchResult(Record):
    """What a step of the case costs."""

    kind: Literal["bench"] = "bench"
    measurement: Measurement


class DebugResult(Record):
    """Which ranks have stopped in the debugger."""

    kind: Literal["debug"] = "debug"
    ranks: tuple[int, ...]


class ProbeResult(Record):
    """What a probe has seen."""

    kind: Literal["probe"] = "probe"
    answer: Answer


class CollectiveResult(Record):
    """What each rank got of a collective, in the order of the ranks."""

    kind: Literal["collective"] = "collective"
    values: tuple[RankValues, ...]


class RouteAnswer(Record):
    """What one batch did in a MoE layer."""

    kind: Literal["route"] = "route"
    result: RouteResult


RankResult = Annotated[
    VerifyResult
    | GoldenResult
    | BenchResult
    | DebugResult
    | ProbeResult
    | CollectiveResult
    | RouteAnswer
    | Refusal,
    Field(discriminator="kind"),
]

_JOBS: TypeAdapter[RankJob] = TypeAdapter(RankJob)
_RESULTS: TypeAdapter[RankResult] = TypeAdapter(RankResult)


def write_job(job: RankJob) -> dict[str, Any]:
    """Return a job as the JSON data of a payload."""
    return job.model_dump(mode="json")


def read_job(payload: Mapping[str, Any]) -> RankJob:
    """Return the job of a payload."""
    # As JSON text: a case is strict about types, and its tuples are lists in JSON alone.
    return _JOBS.validate_json(json.dumps(payload))


def write_result(result: RankResult | None) -> dict[str, Any] | None:
    """Return a result as JSON data; None on the ranks that have none."""
    return None if result is None else result.model_dump(mode="json")


def read_result(content: Mapping[str, Any]) -> RankResult:
    """Return the result that rank 0 gave."""
    return _RESULTS.validate_python(content)


def read_report(text: str) -> RankResult:
    """Return what rank 0 knew of its result before the job was over."""
    return _RESULTS.validate_json(text)
