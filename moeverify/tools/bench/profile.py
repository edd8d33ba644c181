"""Collectives in a torch profiler trace: duration, bytes, bandwidth and overlap with computation.

On a GPU the NCCL kernels contain the name, sizes and group of their collective. On a CPU the gloo events
contain the shape of their input but not their group, so there is no bus bandwidth.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeverify.results.measurement import DeviceWork, Interval, KernelTime, RankStep, Traffic
from moeverify.tools.bench.kernels import find_own_times, sort_work

Span = tuple[float, float]


def merge(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Return the union of spans. Spans that are at most `gap` apart are merged."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the total duration of the union of spans."""
    return sum(end - start for start, end in merge(spans))


def overlap(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Return the duration of the intersection of two lists of disjoint, sorted spans."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


_KINDS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("allgather", "all_gather", "_allgather_base"),
    "reduce_scatter": ("reducescatter", "reduce_scatter", "_reduce_scatter_base"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send and receive": ("sendrecv", "send", "recv"),
}
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "bool": 1, "byte": 1}
# Profiler names of the C++ types of an input.
_PLAIN = {"c10::BFloat16": "bfloat16", "c10::Half": "half", "long int": "long", "unsigned char": "byte"}
_MICROSECONDS = 1e-6
# Spans closer than this fraction of a step are merged, since the plot cannot resolve the gap.
_RESOLUTION = 1 / 1500

# CUDA runtime calls in which the host waits for the device.
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


@dataclass(frozen=True)
class StepProfile:
    """The collectives and the work of a profiled step.

    `together` is the time in seconds in which any collective ran, and `exposed` the time in which nothing
    else ran. `step` holds the intervals of computation and communication. `exposed` and `device` are None
    for a trace without GPU kernels, in which computation is measured by CPU operators.
    """

    traffic: tuple[Traffic, ...]
    together: float
    step: RankStep
    work: tuple[KernelTime, ...]
    exposed: float | None = None
    device: DeviceWork | None = None


def read_profile(path: Path) -> StepProfile:
    """Return the profile of a step from a torch profiler trace, gzip-compressed if its suffix is `.gz`."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    given = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if given:
        ran = [event for event in given if "nccl" in event["name"].lower()]
        others = [event for event in given if "nccl" not in event["name"].lower()]
        together = length(_spans(ran))
        exposed = together - overlap(merge(_spans(ran)), merge(_spans(others)))
        return StepProfile(
            _summarize(ran),
            together * _MICROSECONDS,
            _time_step(events, ran, others),
            sort_work(given),
            exposed * _MICROSECONDS,
            _measure_device(events, given),
        )
    ran = [event for event in events if event["name"].startswith("gloo:")]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    # Autograd nodes include the waits of the collectives inside them, whereas ATen operators only compute.
    computing = [event for event in operators if event["name"].startswith("aten::")]
    work = [event for event in operators if not _is_communication(event)]
    return StepProfile(
        _summarize(ran),
        length(_spans(ran)) * _MICROSECONDS,
        _time_step([*operators, *ran], ran, computing),
        sort_work([*find_own_times(work), *ran]),
    )


def _is_communication(event: Mapping[str, Any]) -> bool:
    return str(event["name"]).startswith(("gloo:", "c10d::", "_c10d_functional::"))


def _time_step(
    events: Sequence[Mapping[str, Any]],
    collectives: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
) -> RankStep:
    """Return when a rank computed and communicated, relative to the first event."""
    begin = min((event["ts"] for event in events), default=0.0)
    whole = max((event["ts"] + event["dur"] for event in events), default=0.0) - begin

    def convert(spans: Iterable[Span]) -> tuple[Interval, ...]:
        found = merge(spans, whole * _RESOLUTION)
        return tuple(((start - begin) * _MICROSECONDS, (end - start) * _MICROSECONDS) for start, end in found)

    busy = merge([*_spans(collectives), *_spans(others)])
    return RankStep(
        seconds=whole * _MICROSECONDS,
        computed=length(_spans(others)) * _MICROSECONDS,
        idle=(whole - length(busy)) * _MICROSECONDS,
        computing=convert(_spans(others)),
        communicating={kind: convert(_spans(same)) for kind, same in _group_by_kind(collectives).items()},
    )


def _measure_device(events: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> DeviceWork:
    waits = sum(event.get("cat") == "cuda_runtime" and event["name"] in _WAITS for event in events)
    return DeviceWork(launches=len(given), waits=waits, busy=length(_spans(given)) * _MICROSECONDS)


def _summarize(ran: Sequence[Mapping[str, Any]]) -> tuple[Traffic, ...]:
    found = [_describe(kind, events) for kind, events in _group_by_kind(ran).items()]
    return tuple(sorted(found, key=lambda traffic: -traffic.seconds))


def _group_by_kind(collectives: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    by_kind: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in collectives:
        by_kind[_find_kind(event)].append(event)
    return by_kind


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
    """Return the share of a collective's larger buffer that crosses the busiest link, as in nccl-tests.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    away = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * away, "broadcast": 1.0, "send and receive": 1.0}.get(kind, away)


def _count_bytes(found: Mapping[str, Any]) -> float | None:
    """Return the bytes of a collective's larger buffer (its input under gloo), or None if unknown."""
    if "In msg nelems" in found:
        elements = max(int(found["In msg nelems"]), int(found.get("Out msg nelems", 0)))
        return float(elements * _BYTES.get(str(found.get("dtype", "")).lower(), 1))
    if not found.get("Input Dims") or not found.get("Input type"):
        return None
    shapes = zip(found["Input Dims"], found["Input type"], strict=False)
    return float(sum(math.prod(shape) * _BYTES.get(_PLAIN.get(kind, kind), 1) for shape, kind in shapes))


def _find_kind(event: Mapping[str, Any]) -> str:
    names = str(event.get("args", {}).get("Collective name", "")), str(event["name"])
    for name in names:
        for kind, parts in _KINDS.items():
            if name and any(part in name.lower().replace("-", "_") for part in parts):
                return kind
    return next(filter(None, names), "other")


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]
