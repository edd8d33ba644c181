"""Plain torch: `parallelize_module` by a plan of module names, then FSDP2 around every block and the model.

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

    `plan` has for names of modules, with `*` for one component, the styles `colwise`, `rowwise` and `sequence`;
    `blocks` names the modules that FSDP2 wraps one by one. Collective: all ranks.

    Raises: CaseError for a name that no module has, and a style that is none.
    """
    refuse_unknown_modules(model, blocks, plan or {})
    replicas, shards = mesh["dp_replicate"], mesh["dp_shard"]
    if mesh["tp"].size() > 1:
        apply_plan(model, mesh["tp"], plan or {})
    if replicas.size() * shards.size() > 1:
        shard_blocks(model, mesh["dp_replicate", "dp_shard"] if replicas.size() > 1 else shards, blocks)
    return model


def refuse_unknown_modules(model: nn.Module, blocks: str, plan: Mapping[str, str]) -> None:
    """Refuse names that no module of the model has, and styles that are none.

    Raises: CaseError that names all of them.
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
    """Divide a model over the mesh (tp) by styles of names of modules."""
    parallelize_module(model, mesh, {name: _STYLES[style]() for name, style in plan.items()})


def shard_blocks(model: nn.Module, mesh: DeviceMesh, blocks: str) -> None:
    """Wrap every block and the model by FSDP2, over the mesh (dp_shard) or (dp_replicate, dp_shard)."""
    for name, module in list(model.named_modules()):
        if blocks and _matches(blocks, name):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None
