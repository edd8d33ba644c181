"""Plain torch: `parallelize_module` with a plan of module names, then FSDP2 on every block and the model.

A case names `parallelize` of this module and needs no code:

    layout:
      dp_shard: 2
      tp: 2
      parallelize: "moeverify.stacks.torch_native:parallelize"
      arguments: {blocks: "layers.*", plan: {"layers.*.up": colwise, "layers.*.down": rowwise}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from moeverify.errors import CaseError, Problem

_STYLES: Mapping[str, type[ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence": SequenceParallel,
}


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, blocks: str = "", plan: Mapping[str, str] | None = None
) -> nn.Module:
    """Return a model divided by torch: over `tp` by a plan, over `dp_replicate` and `dp_shard` by FSDP2.

    `plan` maps module names, with `*` for one component, to the styles `colwise`, `rowwise` and `sequence`.
    `blocks` is a pattern for the modules that FSDP2 wraps individually. Collective: all ranks.

    Raises: CaseError when a name matches no module or a style is unknown.
    """
    refuse_unknown_modules(model, blocks, plan or {})
    replicas, shards = mesh["dp_replicate"], mesh["dp_shard"]
    if mesh["tp"].size() > 1:
        apply_plan(model, mesh["tp"], plan or {})
    if replicas.size() * shards.size() > 1:
        shard_blocks(model, mesh["dp_replicate", "dp_shard"] if replicas.size() > 1 else shards, blocks)
    return model


def refuse_unknown_modules(model: nn.Module, blocks: str, plan: Mapping[str, str]) -> None:
    """Check that each name matches a module of the model and that each style exists.

    Raises: CaseError when any does not; the error lists all of them.
    """
    names = [name for name, _ in model.named_modules() if name]
    patterns = {f"plan.{pattern}": pattern for pattern in plan} | ({"blocks": blocks} if blocks else {})
    problems = [
        Problem(
            f"no module of {type(model).__name__} is named `{pattern}`",
            path=f"layout.arguments.{field}",
            remedy=f"it has {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}",
        )
        for field, pattern in patterns.items()
        if not any(_matches(pattern, name) for name in names)
    ]
    problems += [
        Problem(
            f"`{style}` is no style",
            path=f"layout.arguments.plan.{name}",
            remedy=f"write {', '.join(_STYLES)}",
        )
        for name, style in plan.items()
        if style not in _STYLES
    ]
    if problems:
        raise CaseError(problems)


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divide a model over the mesh (tp), by a plan of module names and styles."""
    parallelize_module(model, mesh, {name: _STYLES[style]() for name, style in plan.items()})


def shard_blocks(model: nn.Module, mesh: DeviceMesh, blocks: str) -> None:
    """Wrap every block and the model by FSDP2, over the mesh (dp_shard) or (dp_replicate, dp_shard)."""
    for name, module in list(model.named_modules()):
        if blocks and _matches(blocks, name):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None
