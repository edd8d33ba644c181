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
    names = [name for name, _ in model.named_modules() if name]
    patterns = {f"plan.{pattern}": pattern for pattern in plan or {}} | ({"blocks": blocks} if blocks else {})
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
        for name, style in (plan or {}).items()
        if style not in _STYLES
    ]
    if problems:
        raise CaseError(problems)
    if mesh["tp"].size() > 1:
        parallelize_module(
            model, mesh["tp"], {name: _STYLES[style]() for name, style in (plan or {}).items()}
        )
    if mesh["dp_replicate"].size() * mesh["dp_shard"].size() > 1:
        data = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
        for name, module in list(model.named_modules()):
            if blocks and _matches(blocks, name):
                fully_shard(module, mesh=data)
        fully_shard(model, mesh=data)
    return model


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None
