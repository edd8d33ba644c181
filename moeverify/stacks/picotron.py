"""picotron: its Llama under its tensor, data and context parallelism.

picotron has no package: PYTHONPATH names the folder of a checkout. The model is built again for the process
groups of a layout and divided as in `train.py`, and each rank copies its part of the whole model's weights. A
case names functions of this module:

    recipe:
      model:
        factory: moeverify.stacks.picotron:make
        arguments: {vocab_size: 96, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
          num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 16}
        loss: moeverify.stacks.picotron:loss
        vocab_size: 96
      data: {seq_len: 16}
    layout:
      tp: 2
      parallelize: "moeverify.stacks.picotron:parallelize"
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moeverify.errors import CaseError
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.environment import kept_environment
from moeverify.stacks.framework import refuse_axes, refuse_model
from moeverify.stacks.picotron_globals import import_picotron, surround
from moeverify.train.engine import PreparedEngine
from moeverify.train.forward import cross_entropy
from moeverify.train.parallelize_custom import ParallelizedCustomModel

_CONSTANTS = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_ONE_RANK = {"tp_rank": 0, "tp_world_size": 1, "cp_rank": 0, "cp_world_size": 1}


class PicotronLoop(PreparedEngine):
    """An engine that runs the backward pass in picotron's surroundings, and clears its buckets of gradients."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer)
        self._model: Any = model

    def zero_grad(self) -> None:
        """Set `.grad` to None, and the gradients in buckets to zero."""
        super().zero_grad()
        if hasattr(self._model, "reset"):
            self._model.reset()

    def backward(self, loss: Tensor) -> None:
        """Accumulate into `.grad` or into the buckets, which are reduced after the last micro-batch."""
        with surround(_unwrap(self._model).groups):
            super().backward(loss)


def make(*, spread: float = 0.1, **fields: Any) -> nn.Module:
    """Return a Llama of picotron on one device. `fields` are those of a Llama's configuration in transformers.

    `max_position_embeddings` must be the sequence length of the data. Constant tensors get random offsets of
    scale `spread`.
    """
    import_picotron("recipe.model.factory")
    model = _build(SimpleNamespace(**_CONSTANTS | fields), SimpleNamespace(**_ONE_RANK), "cpu")
    offset_constants(model.parameters(), spread)
    return model


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each token, (B, S)."""
    inside = _unwrap(model)
    for layer in inside.decoder_layers:  # the tables of RoPE are no buffers
        layer.cos, layer.sin = layer.cos.to(tokens.device), layer.sin.to(tokens.device)
    with surround(inside.groups):
        return cross_entropy(model(input_ids=tokens), targets)


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, make_optimizer: Callable[[nn.Module], Optimizer]
) -> ParallelizedCustomModel:
    """Return a Llama divided as in picotron's `train.py`: over `tp`, `cp` and `dp_replicate`.

    Collective: all ranks.

    Raises: CaseError when picotron does not support an axis, or `make` did not create the model.
    """
    import_picotron("layout.parallelize")
    import picotron.process_group_manager as pgm
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    problems = refuse_axes(mesh, ("dp_shard",), "picotron does not shard")
    if not hasattr(model, "groups"):
        problems.append(refuse_model(f"{type(model).__name__} is no Llama of picotron", __name__))
    if problems:
        raise CaseError(problems)
    sizes = {axis: mesh[axis].size() for axis in ("tp", "cp", "dp_replicate")}
    pgm.setup_process_group_manager(sizes["tp"], sizes["cp"], 1, sizes["dp_replicate"])
    groups = pgm.process_group_manager
    first: Tensor = next(model.parameters())
    config: Any = model.model_config
    divided = _build(config, groups, first.device.type)
    if sizes["tp"] > 1:
        divided = apply_tensor_parallel(divided)
    divided = divided.to(first.device, first.dtype)
    _copy_parts(model, divided, groups)
    wrapped: Any = divided
    # As in train.py, which does not ask for `cp`.
    if sizes["dp_replicate"] > 1:
        wrapped = DataParallelBucket(divided, grad_type=torch.promote_types(first.dtype, torch.float32))

    def accumulate(last: bool) -> AbstractContextManager[object]:
        wrapped.require_backward_grad_sync = last
        return nullcontext()

    engine = PicotronLoop(make_optimizer(wrapped), wrapped)
    return ParallelizedCustomModel(wrapped.train(), engine=engine, accumulate=accumulate)


def _build(config: Any, groups: Any, device_type: str) -> nn.Module:
    """Return a Llama for process groups. `groups` stays with the model, as picotron's own variable is global."""
    from picotron.model import Llama

    # picotron makes the tables of RoPE in the precision and on the device that these name.
    with surround(groups), kept_environment(DTYPE="float32", DEVICE=device_type, LOCAL_RANK=_find_device()):
        model: nn.Module = Llama(config)
    model.groups = groups
    return model


def _find_device() -> str:
    return str(torch.cuda.current_device()) if torch.cuda.is_available() else "0"


@torch.no_grad()
def _copy_parts(whole: nn.Module, divided: nn.Module, groups: Any) -> None:
    """Copy this rank's part of each weight: along the dim, if any, that tensor parallelism has divided."""
    values = dict(whole.named_parameters())
    for name, parameter in divided.named_parameters():
        value: Tensor = values[name]
        for dim, size in enumerate(parameter.shape):
            if size != value.shape[dim]:
                value = value.chunk(groups.tp_world_size, dim)[groups.tp_rank]
        parameter.copy_(value)


def _unwrap(model: nn.Module) -> Any:
    """Return the model inside of picotron's wrapper for data parallelism."""
    return getattr(model, "module", model)
