"""torch.compile for the parts of a block between its collectives: fewer kernel launches.

Only functions of plain tensors and of unwrapped modules are compiled. FSDP2 gathers, token exchanges and
DTensors stay outside. All layers share one graph, because the graph depends on shapes and not on modules.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeverify.cases.choice import Row, Table
from moeverify.cases.rule import blame, is_asked, reading
from moeverify.cases.schema import Case
from moeverify.errors import Problem
from moeverify.results.obstacle import Obstacle, UnsupportedHere
from moeverify.seams import seam

if TYPE_CHECKING:
    from moeverify.model.transformer import Transformer

_COMPILERS = ("g++", "clang++", "c++")


@reading(*(f"layout.{name}" for name in ("compile", "tp", "cp", "pp", "parallelize")), "recipe.model")
def plain_parts(case: Case) -> Iterator[Problem]:
    """Compiled parts contain no DTensors and no collectives."""
    layout, path = case.layout, "layout.compile"
    if layout.parallelize is not None or case.recipe.model.reference is None:
        yield blame(path, "`compile` is for the built-in parallelism of the reference model", "remove it")
    for name in ("tp", "cp", "pp"):
        if is_asked(layout, name):
            yield blame(path, f"compiled parts together with {name} are not supported", f"remove {name}")


class CompileKind(Row):
    """An option of `layout.compile`: which parts of a block torch compiles."""

    def apply(self, model: Transformer) -> None:
        """Compile parts of the model in place.

        Call it after parallelism has replaced modules, and before recomputation and data parallelism wrap
        them.
        """


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
    """Compile attention with its norms, the routers, and the index computation of padded dispatchers.

    Experts are not compiled: with a grouped product they are only six operations, and torch can trace that
    product for bfloat16 only.
    """
    import torch

    from moeverify.model.moe import MoELayer
    from moeverify.model.transformer import TransformerBlock
    from moeverify.parallel.padded_dispatcher import PaddedDispatcher

    for block in model.layers.values():
        assert isinstance(block, TransformerBlock)
        block.mix = torch.compile(block.mix, dynamic=False)
        if isinstance(block.moe, MoELayer):
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
