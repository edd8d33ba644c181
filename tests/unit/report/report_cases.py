"""A failing case with all data that pictures need, in sizes of a real run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moeverify.results.cause import Cause
from moeverify.results.error_map import ErrorMap
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import CheckResult, DetectionLimits, Finding, Worst
from moeverify.results.load import ExpertLoad
from moeverify.results.mesh import MeshShape
from moeverify.results.operation import Scaled
from moeverify.results.place import Place
from moeverify.results.run import CaseResult
from moeverify.results.timeline import CollectiveKind, TimedCollective, Timeline

FAMILIES = ("attention.q_proj.weight", "moe.experts.gate", "moe.experts.down", "ffn_norm.weight")
TENSORS = ("embed.weight", *(f"layers.{layer}.{name}" for layer in range(3) for name in FAMILIES))
EXPERTS = tuple(name for name in TENSORS if "experts" in name)
MESH = MeshShape(
    axes={"dp_shard": 4},
    groups={"dp_shard": ((0, 1, 2, 3),), "efsdp": ((0, 2), (1, 3)), "ep": ((0, 1), (2, 3))},
)
WITHOUT_PICTURES: Mapping[str, Any] = {
    "errors": (),
    "load": None,
    "losses": (),
    "gradient_norms": (),
    "learning_rates": (),
    "timeline": None,
}
# Rank 3 issues one collective less than the others.
TIMELINE = Timeline(
    step=0,
    kinds=(
        CollectiveKind(op="all_gather", axis="dp_shard"),
        CollectiveKind(op="all_to_all", axis="ep", module="layers.0.moe", direction="forward"),
        CollectiveKind(op="all_reduce", axis="", module="layers.2.attention", direction="backward"),
    ),
    ranks=tuple(
        tuple(
            TimedCollective(kind=kind, started=0.001 * kind, seconds=0.0004)
            for kind in range(2 if rank == 3 else 3)
        )
        for rank in range(4)
    ),
    num_issued=(3, 3, 3, 2),
)
LOAD = ExpertLoad(
    layers=(1, 2),
    num_experts=4,
    num_sources=2,
    top_k=1,
    copies=((((5, 0), (1, 7), (0, 0), (2, 2)),) * 2,) * 3,
)


def make_failing(name: str = "fsdp2-ep2", extra: int = 0, **fields: Any) -> CaseResult:
    """Return a case with doubled expert gradients at step 0, in which all tensors differ from step 1 on."""
    first, *others = [
        _make_finding(tensor, step) for step in (0, 1) for tensor in (EXPERTS if step == 0 else TENSORS)
    ]
    subject = Subject(quantity=Quantity.GRADIENT, tensors=EXPERTS, family="expert")
    explanation = Explanation(cause=Cause.SCALE, subject=subject, operation=Scaled(contributions=()))
    first = first.model_copy(
        update={"follows": "", "explanation": explanation, "place": Place(axes=("efsdp", "ep"), ranks=(0, 1))}
    )
    more = [_make_finding(f"layers.1.extra.{number}", 1) for number in range(extra)]
    row0, row1 = (0.002, 5e4, 3e11), (math.inf, 5e4, 3e11)
    content: dict[str, Any] = {
        "file": f"cases/{name}.yaml",
        "verdict": "mismatch",
        "ranks": 4,
        "seconds": 3.25,
        "recipe": "stress-adamw",
        "layout": "fsdp2 4 + ep 2",
        "checks": (
            _make_check("loss", "pass", 1e-16),
            _make_check("gradient", "mismatch", 1.0),
            _make_check("update", "mismatch", math.inf),
        ),
        "findings": (first, *others, *more),
        "losses": ((5.2, 5.2), (5.1, 5.1000001), (5.0, math.nan)),
        "gradient_norms": ((1.0, 1.2), (1.0, 1.2), (1.0, 1.2)),
        "learning_rates": ((1e-3, 1e-3), (2e-3, 2e-3), (1e-3, 1.1e-3)),
        "timeline": TIMELINE,
        "load": LOAD,
        "mesh": MESH,
        "errors": (
            ErrorMap(
                check="gradient",
                tensors=TENSORS,
                steps=(0, 1, 2),
                shares=tuple(row1 if name in EXPERTS else row0 for name in TENSORS),
            ),
        ),
    }
    return CaseResult.model_validate({"name": name, **content, **fields})


def _make_check(name: str, verdict: str, error: float) -> CheckResult:
    worst = Worst(tensor=EXPERTS[0], error=error, bound=1e-10, step=0)
    limits = DetectionLimits(median=1e-10, worst=1e-8, tensor="embed.weight")
    return CheckResult.model_validate(
        {"name": name, "verdict": verdict, "tensors": 39, "worst": worst, "limits": limits}
    )


def _make_finding(tensor: str, step: int) -> Finding:
    return Finding(
        check="gradient",
        kind="gradient",
        tensor=tensor,
        step=step,
        rank=1,
        ranks=(0, 1),
        error=1.0,
        bound=1e-10,
        scale=2.0,
        cosine=1.0,
        follows=EXPERTS[0],
    )
