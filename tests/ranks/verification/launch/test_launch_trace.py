"""The trace records every collective, however it is issued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeverify.verification.launch.launcher import run_jobs
from moeverify.verification.launch.plan import Job

# The expected records of each job's ranks, in order; all-gathers of objects are two collectives.
EXPECTED = {
    "call_plain": [
        ("all_reduce", [2]),
        ("all_gather_into_tensor", [2]),
        ("reduce_scatter_tensor", [4]),
        ("all_to_all_single", [4]),
        ("broadcast", [2]),
        ("barrier", []),
        ("all_gather", [2]),
        ("all_reduce", [4]),
    ],
    "call_functional": [("all_reduce", [2]), ("reduce_scatter_tensor", [4]), ("all_to_all_single", [4])],
    "call_dtensor": [("all_gather_into_tensor", [2, 2])],
    "call_fsdp": [
        ("all_gather_into_tensor", [10]),
        ("reduce_scatter_tensor", [20]),
    ],
    "call_ddp": [("all_reduce", [20])],
    "call_in_inference": [("all_reduce", [2])],
}

Traces = dict[str, list[list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def traces(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Return each job's records, one list per rank."""
    names = [*EXPECTED, "call_point_to_point", "call_objects", "call_in_subgroups"]
    jobs = [Job(name=name, num_ranks=2, timeout=60.0) for name in names]
    folder = tmp_path_factory.mktemp("traces")
    found: Traces = {}
    for outcome in run_jobs(jobs, entry=str(programs / "traced.py"), folder=folder):
        assert outcome.result is not None, outcome
        found[outcome.job] = outcome.result["records"]
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_operations_and_shapes(traces: Traces, name: str) -> None:
    for records in traces[name]:
        # Functional collectives are coalesced ones in some versions of torch.
        names = [record["op"].removesuffix("_coalesced") for record in records]
        assert names == [op for op, _ in EXPECTED[name]]
        # The padding of FSDP's buffers is not compared.
        if name != "call_fsdp":
            assert [record["shape"] for record in records] == [shape for _, shape in EXPECTED[name]]


@pytest.mark.parametrize("name", EXPECTED)
def test_records_count_and_finish(traces: Traces, name: str) -> None:
    for records in traces[name]:
        assert [record["number"] for record in records] == list(range(1, len(records) + 1))
        assert [record["sequence"] for record in records] == list(range(1, len(records) + 1))
        assert {tuple(record["group"]) for record in records} == {(0, 1)}
        assert {record["state"] for record in records} == {"finished"}
        assert all(record["seconds"] >= 0.0 for record in records)
        assert [record["site"] for record in records if "traced.py:" not in record["site"]] == []


def test_the_site_is_the_line_that_called(traces: Traces, programs: Path) -> None:
    lines = (programs / "traced.py").read_text().splitlines()
    number = lines.index("    dist.broadcast(half, src=1)") + 1
    record = traces["call_plain"][0][4]
    assert record["site"] == f"{programs / 'traced.py'}:{number} in call_plain"
    assert (record["peer"], record["dtype"], record["num_tensors"]) == (1, "float32", 1)


def test_point_to_point_counts_for_itself(traces: Traces) -> None:
    seen = [
        [(record["op"], record["peer"], record["sequence"]) for record in records]
        for records in traces["call_point_to_point"]
    ]
    assert seen == [[("send", 1, 1), ("recv", 1, 2)], [("recv", 0, 1), ("send", 0, 2)]]


def test_objects_are_seen(traces: Traces) -> None:
    assert [record["op"] for record in traces["call_objects"][0]] == ["all_gather", "all_gather"]


def test_each_group_counts_for_itself(traces: Traces) -> None:
    for rank, records in enumerate(traces["call_in_subgroups"]):
        assert [record["group"] for record in records] == [[rank], [0, 1], [0, 1]]
        assert [record["sequence"] for record in records] == [1, 1, 2]
        assert records[0]["group_name"] != records[1]["group_name"]


def test_records_are_json(traces: Traces) -> None:
    assert json.loads(json.dumps(traces)) == traces
