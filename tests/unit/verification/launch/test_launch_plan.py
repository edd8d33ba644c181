"""Jobs and plans: JSON in, JSON out."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeverify.verification.launch.plan import Job, LaunchPlan, write_atomically


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    jobs = (
        Job(name="a/b c", num_ranks=2, payload={"x": [1, 2.5, None, {"y": "z"}]}),
        Job(name="d", num_ranks=1),
    )
    plan = LaunchPlan(
        jobs=jobs,
        entry="package.module",
        num_ranks=2,
        folder=tmp_path,
        launch_folder=tmp_path / "launch-1",
        first=3,
        search_path=("/somewhere",),
    )
    plan.write(tmp_path / "plan.json")
    assert LaunchPlan.read(tmp_path / "plan.json") == plan
    assert plan.job_folder(1) == tmp_path / "jobs" / "0004"


def test_a_payload_must_be_json() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        Job(name="a", num_ranks=1, payload={"path": Path("x")})


@pytest.mark.parametrize(("field", "value"), [("num_ranks", 0), ("timeout", 0.0), ("unknown", 1)])
def test_what_a_job_cannot_be(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Job.model_validate({"name": "a", "num_ranks": 1, field: value})


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
