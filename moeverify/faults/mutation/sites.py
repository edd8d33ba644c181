"""Code that is mutated, and the subjects of its bugs: the axes, modules and quantities of each file."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from moeverify.results.place import Stage

DATA_AXES = ("dp_replicate", "dp_shard", "fsdp", "loss ranks", "cp", "edp", "efsdp", "all ranks")
"""Axes that a cause may name for data-parallel code, including derived ones."""


@dataclass(frozen=True)
class Area:
    """A part of the parallel code, and the subjects of its bugs.

    - `file`, `functions`: patterns for the path below `moeverify`, and for qualified names in it.
    - `axes`: mesh axes and other sources that a cause may name. Empty: the code serves every axis.
    - `modules`: patterns of modules and tensors in which such a bug first appears. Empty: anywhere.
    - `stages`, `terms`: the stages of a step and the terms of the loss that the code works on.
    """

    file: str
    functions: str = "*"
    axes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    terms: tuple[str, ...] = ()


_ATTENTION = ("*.attention", "*.attention.*")
_MOE = ("*.moe", "*.moe.*")

# The first match counts.
AREAS: tuple[Area, ...] = (
    Area("parallel/context_parallel/*.py", axes=("cp",), modules=_ATTENTION),
    Area("parallel/tensor.py", "*spread_norm*", ("tp",), ("*_norm*", *_ATTENTION)),
    Area("parallel/tensor.py", "*attention*", ("tp",), _ATTENTION),
    Area("parallel/tensor.py", "*latent*", ("tp",), _ATTENTION),
    Area("parallel/tensor.py", axes=("tp",)),
    Area("parallel/moe_tensor.py", axes=("tp", "etp", "ep"), modules=(*_MOE, "*ffn_norm*")),
    Area("parallel/expert.py", axes=("ep", "etp"), modules=_MOE),
    Area("parallel/pipeline.py", "Pipeline.*", axes=("pp", "micro-batches"), stages=(Stage.DATA,)),
    Area("parallel/pipeline.py", axes=("pp", "micro-batches")),
    Area("parallel/fsdp2.py", "*experts*", (*DATA_AXES, "ep", "etp"), _MOE),
    Area("parallel/fsdp2.py", axes=DATA_AXES),
    Area("parallel/fsdp1*.py", axes=DATA_AXES),
    Area("parallel/ddp.py", axes=(*DATA_AXES, "ep", "etp")),
    # It wraps the model and fills in its values.
    Area(
        "parallel/data_parallel/*.py",
        "*.apply",
        axes=(*DATA_AXES, "ep", "etp"),
        stages=(Stage.INITIALIZATION,),
    ),
    Area("parallel/data_parallel/*.py", axes=(*DATA_AXES, "ep", "etp")),
    Area("parallel/gradients.py"),
    Area("parallel/collectives.py"),
    Area("parallel/meshes.py"),
    Area("parallel/recompute.py"),
    Area("parallel/plan.py"),
    Area(
        "train/clipping.py",
        "gradient_norm",
        stages=(Stage.GRADIENT_NORM, Stage.CLIP),
        modules=("total", "clip_coefficient"),
    ),
    Area("train/clipping.py", "clip_*", stages=(Stage.CLIP,), modules=("clip_coefficient",)),
    Area("train/objective.py", "_balance", terms=("balance",), modules=("balance", "total")),
    Area("train/objective.py", "router_losses", terms=("balance", "z"), modules=("balance", "z", "total")),
    Area(
        "train/objective.py", "count_valid", axes=(*DATA_AXES, "micro-batches"), terms=("lm", "balance", "z")
    ),
    # Code that passes tokens, labels and positions to the model works on data too.
    Area("train/forward.py", "reference_losses*", terms=("lm",), stages=(Stage.DATA,)),
    Area("train/forward.py", terms=("lm",)),
    Area(
        "train/pipeline.py",
        "StageWork.begin",
        axes=("pp", "micro-batches"),
        terms=("lm", "balance", "z"),
        stages=(Stage.DATA, Stage.ROUTING),
    ),
    Area(
        "train/pipeline.py",
        "run_pipeline",
        axes=("pp", "micro-batches"),
        terms=("lm", "balance", "z"),
        stages=(Stage.DATA, Stage.ROUTING),
    ),
    Area("train/pipeline.py", axes=("pp", "micro-batches"), terms=("lm", "balance", "z")),
    Area("train/routing.py", "update_selection_bias", stages=(Stage.STATE,), modules=("*router*",)),
    Area("train/routing.py", "move_bias", stages=(Stage.STATE,), modules=("*router*", "*selection_bias")),
    Area(
        "train/loop.py", "_run_one_by_one", axes=(*DATA_AXES, "micro-batches"), terms=("lm", "balance", "z")
    ),
    Area("train/loop.py", "clip", stages=(Stage.GRADIENT_NORM, Stage.CLIP)),
    Area("train/loop.py", "make_batches"),
    Area("train/optimizer.py", "build_optimizer", stages=(Stage.OPTIMIZER_STEP,)),
    Area("train/assemble.py", "share_of"),
    Area("train/assemble.py", "shapes_of"),
    # The sums of a step: losses, and choices of each expert.
    Area("train/assemble.py", "sums_of*", terms=("lm", "balance", "z"), stages=(Stage.ROUTING,)),
    Area("train/assemble.py", "_sum_over_groups"),
    Area("train/assemble.py", "assemble_parallel"),
    Area("train/assemble.py", "fill_*", stages=(Stage.INITIALIZATION,)),
)


def find_area(file: str, function: str) -> Area | None:
    """Return the area of a function; None if it is not mutated."""
    for area in AREAS:
        if fnmatchcase(file, area.file) and fnmatchcase(function, area.functions):
            return area
    return None
