"""torchtune: its transformer decoders under the tensor parallelism and FSDP2 of its distributed recipe.

A case names functions of this module:

    recipe:
      model:
        factory: moeverify.stacks.configured:make
        arguments: {model: "torchtune.models.llama3:llama3", fields: {num_layers: 2, embed_dim: 32}}
        loss: moeverify.stacks.torchtune:loss
        vocab_size: 96
    layout:
      dp_shard: 2
      tp: 2
      parallelize: "moeverify.stacks.torchtune:parallelize"
      arguments: {tensor_parallel_plan: "torchtune.models.llama3:base_llama_tp_plan"}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.stacks.framework import import_framework, refuse_axes
from moeverify.stacks.kept_precision import KeptPrecision
from moeverify.stacks.loop import FrameworkLoop
from moeverify.train.forward import cross_entropy
from moeverify.train.parallelize_custom import ParallelizedCustomModel
from moeverify.train.target import resolve

# The first release whose recipe has tensor parallelism and a mesh.
LEAST = "0.6.0"
_PLAN = "layout.arguments.tensor_parallel_plan"


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, (B, S), of a decoder that returns all logits."""
    with KeptPrecision():
        return cross_entropy(model(tokens), targets)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer],
    tensor_parallel_plan: str | None = None,
    custom_sharded_layers: Sequence[str] = (),
    reshard_after_forward: bool = True,
) -> ParallelizedCustomModel:
    """Return a decoder divided in the order of torchtune's recipe: tensor parallelism, then FSDP2.

    `tensor_parallel_plan` names a function that returns the plan. The other arguments are those of the recipe.
    Collective: all ranks.

    Raises: CaseError when torchtune does not support the layout.
    """
    import_framework("torchtune", least=LEAST)
    from torchtune import training
    from torchtune.modules import TransformerDecoder

    problems = refuse_axes(mesh, ("dp_replicate", "cp"), "torchtune's recipe does not divide")
    if not isinstance(model, TransformerDecoder):
        message = f"{type(model).__name__} is no TransformerDecoder of torchtune"
        remedy = "name a function such as torchtune.models.llama3:llama3"
        problems.append(Problem(message, path="layout.parallelize", remedy=remedy))
    if mesh["tp"].size() > 1 and tensor_parallel_plan is None:
        remedy = "name one such as torchtune.models.llama3:base_llama_tp_plan"
        problems.append(Problem("tp needs a plan", path=_PLAN, remedy=remedy))
    if problems:
        raise CaseError(problems)
    divided: Any = model
    if mesh["tp"].size() > 1:
        plan = resolve(tensor_parallel_plan or "", _PLAN)()
        try:
            divided = training.prepare_mha_for_tp(divided, mesh["tp"])
        except ValueError as error:
            raise CaseError([Problem(f"torchtune refuses the layout: {error}", path="layout.tp")]) from error
        parallelize_module(divided, mesh["tp"], plan)
    if mesh["dp_shard"].size() > 1:
        condition = partial(training.get_shard_conditions, names_to_match=list(custom_sharded_layers))
        training.shard_model(
            divided,
            [condition],
            cpu_offload=False,
            reshard_after_forward=reshard_after_forward,
            dp_mesh=mesh["dp_shard"],
        )

    def clip_by_norm(limit: float) -> Any:
        return nn.utils.clip_grad_norm_(divided.parameters(), limit)

    optimizer = make_optimizer(divided)
    engine = FrameworkLoop(optimizer, optimizer, torch.autograd.backward, clip_by_norm)
    return ParallelizedCustomModel(divided.train(), engine=engine, accumulate=_reduce_each_time)


def _reduce_each_time(last: bool) -> AbstractContextManager[object]:
    """Return an empty context: the recipe reduces the gradients of every micro-batch."""
    return nullcontext()
