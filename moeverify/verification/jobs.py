"""The jobs that the controller sends to the ranks, and the results of rank 0. Imports no torch.

A job travels as JSON in the payload of `moeverify.verification.launch.plan.Job`, its result as JSON in the
outcome. Rank 0 returns the result type of the job, or a `Refusal` whose reason the user can fix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from moeverify.cases.schema import Case, Recipe
from moeverify.results.bound import Bound, NearChoices
from moeverify.results.collective_run import RankOutput, Transfer
from moeverify.results.error_map import ErrorMap
from moeverify.results.facts import CollectiveFacts
from moeverify.results.finding import CheckResult, Finding
from moeverify.results.golden import GoldenPlan
from moeverify.results.load import ExpertLoad
from moeverify.results.measurement import Measurement
from moeverify.results.observation import Direction, End
from moeverify.results.probe import Answer
from moeverify.results.record import Record
from moeverify.results.route import RouteResult
from moeverify.results.run import TimePart
from moeverify.results.timeline import Timeline

WORKER = "moeverify.verification.worker.main"
"""The module that the ranks run for all jobs except the two kinds below."""

PROBE_WORKER = "moeverify.verification.worker.probes.main"
"""The module that the ranks run for a `ProbeJob`. It imports little, since it looks for broken parts."""

COLLECTIVE_WORKER = "moeverify.verification.worker.collective"
"""The module that the ranks run for a `CollectiveJob`. It imports little, since a user is waiting for it."""


class GoldenOrder(Record):
    """A request for one full golden: a recipe, and the optional checks that need additional tensors.

    `folder` is where it is stored, without the device class, which only a rank knows. `fresh` recomputes an
    existing one. `timeout` is in seconds for this golden alone; None leaves it to the limit of the job.
    `sketch` asks for sketches; see `moeverify.verification.golden.sketched`.
    """

    recipe: Recipe
    also: tuple[str, ...] = ()
    folder: Path
    fresh: bool = False
    sketch: bool = False
    timeout: float | None = None
    search_path: tuple[str, ...] = ()


class GoldenJob(Record):
    """Compute the goldens that are not stored yet, distributed over the ranks."""

    kind: Literal["goldens"] = "goldens"
    orders: tuple[GoldenOrder, ...]


class PlanJob(Record):
    """Predict the cost of the goldens of sketches of these recipes; rank 0 does it."""

    kind: Literal["plan"] = "plan"
    recipes: tuple[Recipe, ...]


class CaseFields(Record):
    """The fields of every job that runs a case on the ranks of its layout; `golden` is its golden's folder.

    `sketch` says that the golden has sketches.

    If `operators` is set, the operators of both sides in the first differing step are written to this file.
    The hypotheses named in `without` are not tested. `explain_seconds` limits the search for the first
    wrong operation, in seconds; 0 disables it.
    """

    case: Case
    golden: Path
    sketch: bool = False
    fault: str | None = None
    search_path: tuple[str, ...] = ()
    explain_seconds: float = 60.0
    operators: Path | None = None
    without: tuple[str, ...] = ()
    widened: bool = False


class VerifyJob(CaseFields):
    """Train the case and compare it with its golden."""

    kind: Literal["verify"] = "verify"

    @property
    def builds_all_meshes(self) -> bool:
        """Return whether only moeverify and eager torch use meshes (no user code, fault or compiler)."""
        recipe, layout = self.case.recipe, self.case.layout
        is_eager = layout.compile == "none" and layout.graphs == "none"
        is_ours = recipe.model.reference is not None and layout.parallelize is None and recipe.step is None
        return is_ours and is_eager and recipe.float8 == "none" and self.fault is None


class SaveJob(CaseFields):
    """Train the case, and save its state to a folder in the middle of training."""

    kind: Literal["save"] = "save"
    checkpoint: Path


class LoadJob(CaseFields):
    """Load the state saved by another case, compare it, and continue training."""

    kind: Literal["load"] = "load"
    checkpoint: Path


class CoverageJob(CaseFields):
    """Verify the case, and write the executed spans of these files, per rank, to an existing folder."""

    kind: Literal["coverage"] = "coverage"
    files: tuple[str, ...]
    folder: Path


class BlamedPlace(Record):
    """The place that the cause of a finding names: the call of a module.

    The place is inside `module`, in the forward or backward pass of one micro-batch. There it is where the
    module's output is complete or, with `inner`, where that inner module receives its input or its
    gradient.
    """

    about: str
    direction: Direction = "forward"
    module: str = ""
    inner: str = ""
    micro_batch: int = 0

    @property
    def reading(self) -> str:
        """Return the module at whose end ranks first differ from one device, or an empty string."""
        return self.inner or self.module

    @property
    def end(self) -> End:
        """Return the end of that module: its output, or the input of an inner module."""
        return "output" if (self.direction == "forward") == (not self.inner) else "input"


class DifferingCollective(Record):
    """The first collective that the ranks of a group issue differently, as seen in an earlier run."""

    about: str
    facts: CollectiveFacts


class StopPoint(Record):
    """The point where ranks stop in the debugger: when they have computed a logical tensor of a finding.

    A rank that reaches `place` stops there instead. If ranks issue different collectives, they stop before
    the first of them, and no tensor is involved.
    """

    kind: str
    tensor: str
    step: int
    about: str
    place: BlamedPlace | None = None
    collective: DifferingCollective | None = None


class DebugJob(CaseFields):
    """Train the case up to a finding, and stop the ranks there in `multiprocessing_pdb`."""

    kind: Literal["debug"] = "debug"
    at: StopPoint


CaseJob = VerifyJob | SaveJob | LoadJob | CoverageJob | DebugJob


class BenchJob(Record):
    """Measure the cost of a step of the case; `profile` is the folder for traces of a step."""

    kind: Literal["bench"] = "bench"
    case: Case
    warmup: int
    steps: int
    profile: Path | None = None
    search_path: tuple[str, ...] = ()


class ProbeJob(Record):
    """Test one feature that may be broken on a machine."""

    kind: Literal["probe"] = "probe"
    probe: str


class CollectiveJob(Record):
    """Run one collective on the inputs in `transfer`, and its backward pass if requested."""

    kind: Literal["collective"] = "collective"
    transfer: Transfer
    backward: bool


class RouteJob(Record):
    """Follow the tokens of one batch through a MoE layer of the case, and show `num_shown` per rank."""

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
    | PlanJob
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
    """The reason why there is no result; it is known on every rank, and the user can fix it."""

    kind: Literal["refusal"] = "refusal"
    error: str


class VerifyResult(Record):
    """The results of a case's checks.

    `losses`, `gradient_norms` and `learning_rates` hold (golden, layout) pairs for each step; losses are
    total losses. `load` counts the token copies per expert. If something differs, `errors` are the errors
    of all tensors, and `timeline` has the collectives of the first differing step. `operators` is the file
    with that step's operators, if requested. `bounds` has the parts of bounds, `choices` the choices near a tie
    that they allow for, and `stages` the parts of the job's time.
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
    stages: tuple[TimePart, ...] = ()
    bounds: tuple[Bound, ...] = ()
    choices: NearChoices | None = None


class GoldenSummary(Record):
    """The part of a golden that is stored in git: losses and norms of every step, tensor fingerprints.

    `damage` describes the defect of the cached golden that this one replaces. `seconds` is the time to
    compute it and its noise; None if it was kept from an earlier run.
    """

    losses: dict[str, float]
    tensors: dict[str, list[float] | str]
    damage: str = ""
    seconds: float | None = None


class GoldenResult(Record):
    """The summaries of goldens in the order of the job, or refusals; `device_class` says where they ran."""

    kind: Literal["goldens"] = "goldens"
    device_class: str
    goldens: tuple[GoldenSummary | Refusal, ...]


class GoldenEnd(Record):
    """Report that the golden of `recipe` is there, as golden number `num_done` of `num_total` of its job."""

    kind: Literal["golden-end"] = "golden-end"
    recipe: str
    num_done: int
    num_total: int


class PlanResult(Record):
    """The predicted costs of goldens in the order of the job."""

    kind: Literal["plans"] = "plans"
    plans: tuple[GoldenPlan, ...]


class BenchResult(Record):
    """The cost of a step of the case."""

    kind: Literal["bench"] = "bench"
    measurement: Measurement


class DebugResult(Record):
    """The ranks that have stopped in the debugger."""

    kind: Literal["debug"] = "debug"
    ranks: tuple[int, ...]


class ProbeResult(Record):
    """The observation of a probe."""

    kind: Literal["probe"] = "probe"
    answer: Answer


class CollectiveResult(Record):
    """The output of a collective on each rank, in rank order."""

    kind: Literal["collective"] = "collective"
    values: tuple[RankOutput, ...]


class RouteAnswer(Record):
    """The path of one batch through a MoE layer."""

    kind: Literal["route"] = "route"
    result: RouteResult


RankResult = Annotated[
    VerifyResult
    | GoldenResult
    | GoldenEnd
    | PlanResult
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
    # Validated as JSON text: cases are strict about types, and accept lists as tuples only in JSON mode.
    return _JOBS.validate_json(json.dumps(payload))


def write_result(result: RankResult | None) -> dict[str, Any] | None:
    """Return a result as JSON data; None on ranks without a result."""
    return None if result is None else result.model_dump(mode="json")


def read_result(content: Mapping[str, Any]) -> RankResult:
    """Return the result of rank 0."""
    return _RESULTS.validate_python(content)


def read_report(text: str) -> RankResult:
    """Return the preliminary result that rank 0 reported before the job was over."""
    return _RESULTS.validate_json(text)
