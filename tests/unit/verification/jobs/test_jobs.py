"""Objects that cross process boundaries arrive with equal values and types."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from moeverify.cases.validation.load import load_cases
from moeverify.results.facts import ComparedFacts, DtypeFacts, DtypeUse, NumCollectives
from moeverify.results.finding import CheckResult, Finding, Worst
from moeverify.results.measurement import Measurement, Roofline
from moeverify.results.probe import Answer, ProbeOutcome
from moeverify.verification.jobs import (
    BenchJob,
    BenchResult,
    GoldenJob,
    GoldenOrder,
    GoldenResult,
    GoldenSummary,
    LoadJob,
    ProbeJob,
    ProbeResult,
    RankJob,
    RankResult,
    Refusal,
    SaveJob,
    VerifyJob,
    VerifyResult,
    read_job,
    read_report,
    read_result,
    write_job,
    write_result,
)

CASE = load_cases([Path(__file__).parents[4] / "cases" / "pp.yaml"])[0]
CUSTOM = load_cases([Path(__file__).parents[4] / "examples" / "my_gpt"])[0]
FIELDS = {"case": CASE, "golden": Path("/cache/abc"), "fault": "a:b", "search_path": ("/x",)}

JOBS: list[RankJob] = [
    VerifyJob.model_validate(FIELDS),
    VerifyJob(case=CUSTOM, golden=Path("/cache/def")),
    SaveJob.model_validate({**FIELDS, "checkpoint": Path("/c")}),
    LoadJob.model_validate({**FIELDS, "checkpoint": Path("/c")}),
    GoldenJob(orders=(GoldenOrder(recipe=CASE.recipe, also=("trace",), folder=Path("/g"), fresh=True),)),
    BenchJob(case=CASE, warmup=1, steps=2),
    ProbeJob(probe="triton"),
]

FINDING = Finding(
    check="gradient",
    kind="gradient",
    tensor="w",
    step=0,
    rank=1,
    error=math.inf,
    bound=1e-10,
    facts=ComparedFacts(absent_ranks=(1,), num_nonfinite=3),
)
DTYPE = FINDING.model_copy(
    update={
        "facts": DtypeFacts(
            use=DtypeUse.REDUCES, module="", dtype="a", wanted="b", parameters=("w",), num_known=1, how=("x",)
        )
    }
)
CHECK = CheckResult(
    name="trace",
    verdict="mismatch",
    tensors=2,
    worst=Worst(tensor="w", error=math.nan, bound=0.0),
    inconclusive=1,
    facts=NumCollectives(most=4),
)
RESULTS: list[RankResult] = [
    VerifyResult(checks=(CHECK,), findings=(FINDING, DTYPE), losses=((1.0, math.inf),)),
    GoldenResult(
        device_class="cpu",
        goldens=(GoldenSummary(losses={"a": 1.0}, tensors={"b": [1.0], "c": "hash"}), Refusal(error="no")),
    ),
    BenchResult(measurement=Measurement(name="a", ranks=2, roofline=Roofline(matmul=1e9))),
    ProbeResult(answer=Answer(outcome=ProbeOutcome.WRONG, wrong=("float64",))),
    Refusal(error="there is no module `x`"),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.kind)
def test_a_job_comes_back_as_it_was(job: RankJob) -> None:
    assert read_job(json.loads(json.dumps(write_job(job)))) == job


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.kind)
def test_a_result_comes_back_as_it_was(result: RankResult) -> None:
    written = write_result(result)
    assert written is not None
    found = read_result(json.loads(json.dumps(written)))
    assert type(found) is type(result)
    assert repr(found) == repr(result)  # a NaN is not equal to itself
    assert repr(read_report(result.model_dump_json())) == repr(result)


def test_ranks_without_a_result_write_none() -> None:
    assert write_result(None) is None


@pytest.mark.parametrize(
    "payload",
    [{}, {"kind": "none of ours"}, {"kind": "probe", "probe": "a", "more": 1}, {"kind": "verify"}],
    ids=["empty", "unknown", "one field more", "fields missing"],
)
def test_a_payload_that_is_no_job_is_refused(payload: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        read_job(payload)


def test_a_case_is_read_as_strictly_as_from_its_file() -> None:
    content = write_job(JOBS[0])
    content["case"]["layout"]["pp"] = "2"
    with pytest.raises(ValidationError, match=r"layout\.pp"):
        read_job(content)
