"""torch.compile of the parts of a block between its collectives: few kernels where each operation had its own.

Compiled are functions of tensors and of modules that no wrapper has changed: gathers of FSDP2, exchanges of tokens
and DTensors stay outside. All layers share one graph, which depends on shapes and not on modules.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeverify.case.choice import Row, Table
from moeverify.case.rule import blame, is_asked, reading
from moeverify.case.schema import Case
from moeverify.errors import Problem
from moeverify.results.obstacle import Obstacle, UnsupportedHere
from moeverify.seams import seam

if TYPE_CHECKING:
    from moeverify.model.transformer import Transformer

_COMPILERS = ("g++", "clang++", "c++")


@reading(
    *(f"layout.{name}" for name in ("compile", "tp", "cp", "pp", "recompute", "parallelize")), "recipe.model"
)
def plain_parts(case: Case) -> Iterator[Problem]:
    """What is compiled has neither DTensors nor collectives in it, and runs once forward and once backward."""
    layout, path = case.layout, "layout.compile"
    if layout.parallelize is not None or case.recipe.model.reference is None:
        yield blame(path, "`compile` is for the built-in parallelism of the reference model", "remove it")
    for name in ("tp", "cp", "pp", "recompute"):
        if is_asked(layout, name):
            yield blame(path, f"compiled parts together with {name} are not supported", f"remove {name}")


class CompileKind(Row):
    """How much of a block torch compiles."""

    def apply(self, model: Transformer) -> None:
        """Compile, when modules have become what runs, and before recomputation and data parallelism wrap them."""


@dataclass(frozen=True, kw_only=True)
class _Parts(CompileKind):
    def find_obstacle(self, case: Case, device: str, backend: str) -> Obstacle | None:
        if device == "cpu" and not any(shutil.which(name) for name in _COMPILERS):
            return UnsupportedHere(why="torch.compile needs a C++ compiler on a CPU, and there is none")
        return None

    def apply(self, model: Transformer) -> None:
        compile_parts(model)


@seam
def compile_parts(model: Transformer) -> None:
    """Compile attention with its norms, routers, and the places of token copies in exchanges of fixed sizes.

    Experts stay as they are: with a grouped product they are six operations already, whose tracing torch has for
    bfloat16 alone.
    """
    import torch

    from moeverify.model.moe import MoE
    from moeverify.model.transformer import Block
    from moeverify.parallel.padded_dispatcher import PaddedDispatcher

    for block in model.layers.values():
        assert isinstance(block, Block)
        block.mix = torch.compile(block.mix, dynamic=False)
        if isinstance(block.moe, MoE):
            block.moe.router.compile(dynamic=False)
            if isinstance(block.moe.dispatcher, PaddedDispatcher):
                block.moe.dispatcher.compile()


COMPILE: Table[CompileKind] = Table(
    path="layout.compile",
    home=__name__,
    rows={
        "none": CompileKind(meaning="Nothing: each operation is a kernel."),
        "parts": _Parts(
            meaning="Attention with its norms, routers, and the places of token copies in padded exchanges.",
            rules=(plain_parts,),
        ),
    },
)
