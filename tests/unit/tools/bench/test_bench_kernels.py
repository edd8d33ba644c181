"""Purposes of kernels and operators, from their names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from moeverify.tools.bench.kernels import find_own_times, name_kind, sort_work
from moeverify.tools.bench.profile import read_profile


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<...>>>",
            "grouped products",
        ),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("triton_poi_fused_add_mul_3", "compiled"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdam...>", "optimizer"),
        ("void at::native::indexing_backward_kernel<...>", "gathers and scatters"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "elementwise",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("void at::native::reduce_kernel<512, 1, ...>", "reductions"),
        ("aten::mm", "matrix products"),
        ("aten::_unsafe_view", "views"),
        ("autograd::engine::evaluate_function: MmBackward0", "autograd itself"),
        ("a_kernel_of_nobody", "other"),
    ],
)
def test_a_name_has_a_kind(name: str, kind: str) -> None:
    assert name_kind(name) == kind


def test_time_of_an_operator_is_less_that_of_those_it_calls() -> None:
    events = [
        {"name": "aten::linear", "tid": 1, "ts": 0.0, "dur": 10.0},
        {"name": "aten::t", "tid": 1, "ts": 1.0, "dur": 2.0},
        {"name": "aten::mm", "tid": 1, "ts": 4.0, "dur": 5.0},
        {"name": "aten::copy_", "tid": 1, "ts": 5.0, "dur": 1.0},
        {"name": "aten::add", "tid": 1, "ts": 10.0, "dur": 3.0},
        {"name": "aten::mul", "tid": 2, "ts": 2.0, "dur": 4.0},  # another thread: no child of this operator
    ]
    own = {str(event["name"]): event["dur"] for event in find_own_times(events)}
    assert own == {
        "aten::linear": 3,
        "aten::t": 2,
        "aten::mm": 4,
        "aten::copy_": 1,
        "aten::add": 3,
        "aten::mul": 4,
    }
    assert sum(work.seconds for work in sort_work(find_own_times(events))) == pytest.approx(17e-6)


def test_a_compressed_trace_says_when_a_rank_computed_communicated_and_did_neither(tmp_path: Path) -> None:
    def make(name: str, start: float, length: float) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": "kernel", "ts": start, "dur": length, "args": {}}

    path = tmp_path / "rank-0.json.gz"
    ran = [
        make("nvjet_gemm", 100.0, 40.0),
        make("ncclDevKernel_AllGather", 120.0, 40.0),
        make("triton_a", 180.0, 20.0),
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": ran}).encode()))
    profile = read_profile(path)
    assert profile.step.seconds == pytest.approx(100e-6)
    assert profile.step.computed == pytest.approx(60e-6)
    assert profile.step.idle == pytest.approx(20e-6)  # 160 to 180
    assert profile.exposed == pytest.approx(20e-6)  # 140 to 160
    assert [tuple(round(1e6 * part) for part in each) for each in profile.step.computing] == [
        (0, 40),
        (80, 20),
    ]
    assert list(profile.step.communicating) == ["all_gather"]
    assert {work.kind: work.count for work in profile.work} == {
        "matrix products": 1,
        "collectives": 1,
        "compiled": 1,
    }
