"""Code that is mutated, and the mesh axes that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

DATA_AXES = ("dp_replicate", "dp_shard", "fsdp", "all data ranks", "cp", "edp", "efsdp", "all ranks")
"""Axes of data-parallel code, including derived ones."""


@dataclass(frozen=True)
class Area:
    """A part of the parallel code.

    - `file`, `functions`: patterns for the path below `moeverify`, and for qualified names in it.
    - `axes`: mesh axes that the code serves. Empty: every axis.
    """

    file: str
    functions: str = "*"
    axes: tuple[str, ...] = ()


_STAGES = ("pp", "micro-batches")
_SHARDS = (*DATA_AXES, "ep", "etp")

# The first match counts.
AREAS: tuple[Area, ...] = (
    Area("parallel/context_parallel/*.py", axes=("cp",)),
    Area("parallel/tensor.py", axes=("tp",)),
    Area("parallel/moe_tensor.py", axes=("tp", "etp", "ep")),
    Area("parallel/expert.py", axes=("ep", "etp")),
    Area("parallel/pipeline.py", axes=_STAGES),
    Area("parallel/fsdp2.py", "*experts*", _SHARDS),
    Area("parallel/fsdp2.py", axes=DATA_AXES),
    Area("parallel/fsdp1*.py", axes=DATA_AXES),
    Area("parallel/ddp.py", axes=_SHARDS),
    Area("parallel/data_parallel/*.py", axes=_SHARDS),
    *(Area(f"parallel/{each}.py") for each in ("gradients", "collectives", "meshes", "recompute", "plan")),
    Area("train/clipping.py", "gradient_norm"),
    Area("train/clipping.py", "clip_*"),
    Area("train/objective.py", "_balance"),
    Area("train/objective.py", "router_losses"),
    Area("train/objective.py", "count_valid", (*DATA_AXES, "micro-batches")),
    Area("train/forward.py"),
    Area("train/pipeline.py", axes=_STAGES),
    Area("train/routing.py", "update_selection_bias"),
    Area("train/routing.py", "move_bias"),
    Area("train/loop.py", "_run_one_by_one", (*DATA_AXES, "micro-batches")),
    Area("train/loop.py", "clip"),
    Area("train/loop.py", "make_batches"),
    Area("train/optimizer.py", "build_optimizer"),
    Area("train/assemble.py", "share_of"),
    Area("train/assemble.py", "shapes_of"),
    Area("train/assemble.py", "sums_of*"),
    Area("train/assemble.py", "_sum_over_groups"),
    Area("train/assemble.py", "assemble_parallel"),
    Area("train/assemble.py", "fill_*"),
)


def find_area(file: str, function: str) -> Area | None:
    """Return the area of a function; None if it is not mutated."""
    for area in AREAS:
        if fnmatchcase(file, area.file) and fnmatchcase(function, area.functions):
            return area
    return None
