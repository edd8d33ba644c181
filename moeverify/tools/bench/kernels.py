"""Classification of GPU kernels and CPU operators by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from moeverify.results.measurement import KernelTime

_MICROSECONDS = 1e-6
# The first pattern found in the lower-case name decides. Covers kernels of torch, cuBLAS, CUTLASS, cuDNN,
# Inductor and megablocks, and ATen operators. Unknown kernels count as `other`.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("collectives", r"nccl|^gloo:|c10d::"),
        ("autograd itself", r"^autograd::|backward\d?$|accumulategrad"),
        ("grouped products", r"grouped|groupproblem|_sdd|_dsd|_dds"),
        ("attention", r"flash|fmha|sdpa|attention"),
        ("compiled", r"^triton_|compiledfx|inductor"),
        (
            "matrix products",
            r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|::b?mm$|::(addmm|linear|matmul|baddbmm)$",
        ),
        ("optimizer", r"multi_tensor|_fused_adam|_foreach"),
        ("sorts and running sums", r"sort|scan|cumsum|topk|bitonic|histogram|searchsorted"),
        ("gathers and scatters", r"index|gather|scatter|embedding|take"),
        (
            "copies and fills",
            r"memcpy|memset|catarray|copy|::cat$|fill|::(zero_|clone|empty|zeros|ones|arange)",
        ),
        ("reductions", r"reduce|::sum|::mean|norm|softmax|logsumexp|::max|::min|::any$|::all$"),
        (
            "views",
            r"::(_?unsafe_view|view|reshape|transpose|t$|expand|slice|select|detach|alias|as_strided|squeeze)",
        ),
        ("views", r"::(unsqueeze|permute|chunk|split|narrow|unbind|resolve|lift_fresh|result_type|set_$)"),
        (
            "elementwise",
            r"elementwise|::(add|sub|mul|div|neg|pow|exp|log|sqrt|rsqrt|sigmoid|silu|where|clamp|lerp)"
            r"|::(eq|ne|lt|le|gt|ge|logical|bitwise|to$|_to_copy)",
        ),
    )
)


def sort_work(ran: Iterable[Mapping[str, Any]]) -> tuple[KernelTime, ...]:
    """Return the kinds of work in the events of a profile, with count and time, the longest first."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in ran:
        kind = name_kind(str(event["name"]))
        counts[kind] += 1
        seconds[kind] += event["dur"] * _MICROSECONDS
    found = [KernelTime(kind=kind, count=counts[kind], seconds=seconds[kind]) for kind in counts]
    return tuple(sorted(found, key=lambda work: -work.seconds))


def name_kind(name: str) -> str:
    """Return the kind of a kernel or operator."""
    lowered = name.lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(lowered)), "other")


def find_own_times(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return CPU operators with their self time as `dur`, excluding the operators that they call."""
    by_thread: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event.get("tid")].append(dict(event))
    found: list[Mapping[str, Any]] = []
    for of_thread in by_thread.values():
        of_thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_calls: list[tuple[float, dict[str, Any]]] = []  # with the end of each
        for event in of_thread:
            whole = event["dur"]
            while open_calls and open_calls[-1][0] <= event["ts"]:
                open_calls.pop()
            if open_calls:
                open_calls[-1][1]["dur"] -= whole
            open_calls.append((event["ts"] + whole, event))
        found += of_thread
    return found
