"""Which code is mutated, and what a bug in it can be about: the axes, modules and quantities of each file."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from moeverify.results.place import Stage

DATA_AXES = ("dp_replicate", "dp_shard", "fsdp", "loss ranks", "cp", "edp", "efsdp", "all ranks")
"""What a cause may name of code that serves data parallelism: its axes, and what is made of them."""


@dataclass(frozen=True)
class Area:
    """Some of the parallel code, and what its bugs are about.

    `file` and `functions` are patterns: a path below `moeverify`, and qualified names in it. `axes` are the mesh
    axes and other sources that a cause may name; none means that the code serves every axis. `modules` are patterns
    of modules and tensors in which such a bug is first seen; none means anywhere. `stages` and `terms` are those of
    a step and of the loss that it works on.
    """

    file: str
    functions: str = "*"
    axes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    terms: tuple[str, ...] = ()


_ATTENTION = ("*.attention", "*.attention.*")
_MOE = ("*.moe", "*.moe.*")

# The first that matches counts.
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
    # It wraps the model and has its values filled in.
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
    # What hands tokens, labels and positions on to the model works on data too.
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
    # The sums of a step: of losses, and of the choices of each expert.
    Area("train/assemble.py", "sums_of*", terms=("lm", "balance", "z"), stages=(Stage.ROUTING,)),
    Area("train/assemble.py", "_sum_over_groups"),
    Area("train/assemble.py", "assemble_parallel"),
    Area("train/assemble.py", "fill_*", stages=(Stage.INITIALIZATION,)),
)


def find_area(file: str, function: str) -> Area | None:
    """Return the area of a function of a file, None where it is not mutated."""
    for area in AREAS:
        if fnmatchcase(file, area.file) and fnmatchcase(function, area.functions):
            return area
    return None
