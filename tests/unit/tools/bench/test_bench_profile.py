from __future__ import annotations

import json

import pytest

from moeverify.tools.bench.profile import bus_factor, read_profile


def write(path, events) -> None:
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", **event} for event in events]}))


def make_kernel(name: str, start: float, length: float, **args: object) -> dict[str, object]:
    return {"name": name, "cat": "kernel", "ts": start, "dur": length, "args": args}


def make_nccl(start: float, length: float, name: str, elements: int, ranks: int) -> dict[str, object]:
    told = {"Collective name": name, "In msg nelems": elements, "Out msg nelems": 1, "dtype": "BFloat16"}
    return make_kernel("ncclDevKernel_SendRecv", start, length, **told, **{"Group size": ranks})


def test_kernels_of_nccl_give_time_sizes_and_what_was_not_hidden(tmp_path) -> None:
    path = tmp_path / "trace.json"
    write(
        path,
        [
            make_nccl(0.0, 100.0, "all_to_allv", 1_000_000, 4),
            make_nccl(50.0, 100.0, "_allgather_base", 500_000, 2),
            make_kernel("sm90_gemm", 80.0, 40.0),
            make_kernel("sm90_gemm", 140.0, 100.0),
            {"name": "record_param_comms", "cat": "cpu_op", "ts": 0.0, "dur": 5.0, "args": {}},
            {"name": "cudaEventSynchronize", "cat": "cuda_runtime", "ts": 0.0, "dur": 5.0, "args": {}},
            {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 0.0, "dur": 5.0, "args": {}},
        ],
    )
    profile = read_profile(path)
    by_kind = {found.kind: found for found in profile.traffic}
    assert set(by_kind) == {"all_to_all", "all_gather"}
    assert by_kind["all_to_all"].seconds == pytest.approx(1e-4)
    assert by_kind["all_to_all"].payload == 2_000_000
    assert by_kind["all_to_all"].bus_bandwidth == pytest.approx(2e6 * 0.75 / 1e-4)
    assert by_kind["all_gather"].bus_bandwidth == pytest.approx(1e6 * 0.5 / 1e-4)
    assert profile.together == pytest.approx(150e-6)  # 0 to 150: overlapping ones count once
    assert profile.exposed == pytest.approx(100e-6)  # 80 to 120 and 140 to 150 are hidden
    assert profile.device is not None
    assert (profile.device.launches, profile.device.waits) == (4, 1)
    assert profile.device.busy == pytest.approx(240e-6)


def test_events_of_gloo_give_time_and_sizes(tmp_path) -> None:
    path = tmp_path / "trace.json"
    sizes = {"Input Dims": [[10, 4]], "Input type": ["double"]}
    event = {"name": "gloo:all_to_all", "cat": "user_annotation", "ts": 1.0, "dur": 20.0, "args": sizes}
    write(path, [event, {**event, "ts": 50.0}, {"name": "aten::mm", "cat": "cpu_op", "ts": 0.0, "dur": 9.0}])
    profile = read_profile(path)
    (traffic,) = profile.traffic
    assert (traffic.kind, traffic.count, traffic.payload) == ("all_to_all", 2, 640)
    assert traffic.bus_bandwidth is None
    assert profile.together == pytest.approx(40e-6)
    assert profile.exposed is None


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert (
        bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    )
