"""Collectives in the trace of torch's profiler: what ran, for how long, what it moved, and what it hid behind.

On a GPU the kernels of NCCL carry name, sizes and group of their collective. On a CPU gloo's events carry the
shape of their input, but not their group, so there is no bus bandwidth.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeverify.results.measurement import DeviceWork, Traffic

_KINDS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("allgather", "all_gather", "_allgather_base"),
    "reduce_scatter": ("reducescatter", "reduce_scatter", "_reduce_scatter_base"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send and receive": ("sendrecv", "send", "recv"),
}
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "bool": 1, "byte": 1}
# What the profiler calls the C++ types of an input.
_PLAIN = {"c10::BFloat16": "bfloat16", "c10::Half": "half", "long int": "long", "unsigned char": "byte"}
_MICROSECONDS = 1e-6


# What a host waits for a device with, by CUDA's names.
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


@dataclass(frozen=True)
class StepProfile:
    """The collectives of a profiled step, the seconds in which any ran, and those in which nothing else did.

    Beside them what the device was given to do, and how long it did anything. `exposed` and `device` are None for a
    trace without GPU kernels.
    """

    traffic: tuple[Traffic, ...]
    together: float
    exposed: float | None = None
    device: DeviceWork | None = None


def read_profile(path: Path) -> StepProfile:
    """Return what a trace of torch's profiler says of collectives."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        ran = [event for event in kernels if "nccl" in event["name"].lower()]
        others = [event for event in kernels if "nccl" not in event["name"].lower()]
        together = _length(_spans(ran))
        exposed = together - _overlap(_merge(_spans(ran)), _merge(_spans(others)))
        return StepProfile(
            _summarize(ran), together * _MICROSECONDS, exposed * _MICROSECONDS, _measure_device(events)
        )
    ran = [event for event in events if event["name"].startswith("gloo:")]
    return StepProfile(_summarize(ran), _length(_spans(ran)) * _MICROSECONDS)


def _measure_device(events: Sequence[Mapping[str, Any]]) -> DeviceWork:
    given = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    waits = sum(event.get("cat") == "cuda_runtime" and event["name"] in _WAITS for event in events)
    return DeviceWork(launches=len(given), waits=waits, busy=_length(_spans(given)) * _MICROSECONDS)


def _summarize(ran: Sequence[Mapping[str, Any]]) -> tuple[Traffic, ...]:
    by_kind: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in ran:
        named = str(event.get("args", {}).get("Collective name", ""))
        by_kind[_kind_of(named, str(event["name"]))].append(event)
    found = [_describe(kind, events) for kind, events in by_kind.items()]
    return tuple(sorted(found, key=lambda traffic: -traffic.seconds))


def _describe(kind: str, events: Sequence[Mapping[str, Any]]) -> Traffic:
    seconds = sum(event["dur"] for event in events) * _MICROSECONDS
    moved = [_count_bytes(event.get("args", {})) for event in events]
    sizes = [event.get("args", {}).get("Group size") for event in events]
    payload = bandwidth = None
    if None not in moved:
        payload = sum(count for count in moved if count is not None)
        if None not in sizes and seconds > 0:
            shares = (bus_factor(kind, int(size or 1)) for size in sizes)
            carried = sum((count or 0.0) * share for count, share in zip(moved, shares, strict=True))
            bandwidth = carried / seconds
    return Traffic(kind=kind, count=len(events), seconds=seconds, payload=payload, bus_bandwidth=bandwidth)


def bus_factor(kind: str, num_ranks: int) -> float:
    """Return the share of a collective's larger buffer that crosses the busiest link, as nccl-tests count.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    away = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * away, "broadcast": 1.0, "send and receive": 1.0}.get(kind, away)


def _count_bytes(found: Mapping[str, Any]) -> float | None:
    """Return the bytes of a collective's larger buffer, of its input under gloo; None where nothing says so."""
    if "In msg nelems" in found:
        elements = max(int(found["In msg nelems"]), int(found.get("Out msg nelems", 0)))
        return float(elements * _BYTES.get(str(found.get("dtype", "")).lower(), 1))
    if not found.get("Input Dims") or not found.get("Input type"):
        return None
    shapes = zip(found["Input Dims"], found["Input type"], strict=False)
    return float(sum(math.prod(shape) * _BYTES.get(_PLAIN.get(kind, kind), 1) for shape, kind in shapes))


def _kind_of(*names: str) -> str:
    for name in names:
        for kind, parts in _KINDS.items():
            if name and any(part in name.lower().replace("-", "_") for part in parts):
                return kind
    return next(filter(None, names), "other")


def _spans(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


def _merge(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in _merge(spans))


def _overlap(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> float:
    """Return how long two lists of disjoint, sorted spans have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
