"""megatron-core: its GPT with experts under its tensor, expert and data parallelism.

A whole model is built in a world of one rank. Under a layout Megatron builds the divided model, and each
rank copies its part of the whole model's values. Gradients are in `main_grad`. Norm, clip and step are
those of Megatron's optimizer, including the distributed one. Megatron keeps norms, losses and moments in
float32, so a recipe needs `precision: float32`. A case names functions of this module and needs no code:

    recipe:
      model:
        factory: moeverify.stacks.megatron:make
        arguments: {vocab_size: 96, num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_moe_experts: 4, ...}
        loss: moeverify.stacks.megatron:loss
        vocab_size: 96
    layout:
      dp_shard: 2
      parallelize: "moeverify.stacks.megatron:parallelize"
      arguments: {expert_model_parallel_size: 2}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer as TorchOptimizer

from moeverify.cases.schema import Optimizer
from moeverify.errors import CaseError, Problem
from moeverify.parallel.regions.local_shard import LocalShard
from moeverify.parallel.regions.region import Region
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.framework import (
    import_framework,
    number_globally,
    refuse_axes,
    refuse_model,
    refuse_unknown_arguments,
)
from moeverify.stacks.megatron_on_cpu import stand_in_for_cuda
from moeverify.train.clipping import clip_coefficient
from moeverify.train.engine import PreparedEngine
from moeverify.train.parallelize_custom import ParallelizedCustomModel
from moeverify.verification.launch.single_rank_world import single_rank_world

# The oldest release that was tested.
LEAST = "0.16.0"
# Fields of TransformerConfig that do not depend on sizes: no dropout, no fused kernels, the norms of torch.
_PLAIN: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


def make(*, vocab_size: int, max_sequence_length: int = 64, spread: float = 0.1, **config: Any) -> nn.Module:
    """Return a whole GPTModel of plain torch modules (`get_gpt_layer_local_spec`), with random weights.

    `config` holds fields of Megatron's TransformerConfig. Constant tensors, such as norm weights and
    biases, get random offsets of scale `spread`; see `offset_constants`.

    Raises: CaseError when TransformerConfig does not have a field.
    """
    import_framework("megatron.core", least=LEAST, path="recipe.model.factory", distribution="megatron-core")
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    if problems := refuse_unknown_arguments(TransformerConfig, config, path="recipe.model.arguments"):
        raise CaseError(problems)
    sizes = {"vocab_size": vocab_size, "max_sequence_length": max_sequence_length}
    with single_rank_world(torch.device("cpu")), stand_in_for_cuda("cpu"):
        _join_one_rank()
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        model: nn.Module = _build(config, sizes)
    offset_constants(model.parameters(), spread)
    model.parallel_state = _read_parallel_state()  # type: ignore[assignment]  # for `loss`
    model.made_of = (config, sizes)  # type: ignore[assignment]  # for `parallelize`, which builds the model again
    return model


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return Megatron's cross entropy of each token, (batch, seq_len), with 0 where there is no target."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    state: Any = model.parallel_state
    vars(parallel_state).update(state)  # global state of the process, in which a golden is trained as well
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_valid = targets >= 0
    with stand_in_for_cuda(tokens.device.type):
        with torch.random.fork_rng(devices=[]):
            # Attention reads the random state of its device even without dropout.
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        found: Tensor = model(tokens, positions, None, labels=targets.clamp(min=0))
    return found * is_valid


class MegatronLoop(PreparedEngine):
    """Megatron optimizer of a model in its DistributedDataParallel. See `moeverify.train.engine.Engine`.

    The distributed optimizer reduces gradients and keeps moments in flat ranges, one per rank of a
    data-parallel group. The tensors of a parameter are assembled from the ranges of all ranks.
    """

    def __init__(self, model: Any, groups: TorchOptimizer, optimizer: Any, device_type: str) -> None:
        # `groups` is a torch optimizer with Megatron's parameter groups, as learning-rate schedulers
        # require.
        super().__init__(groups)
        self._model = model
        self._chained = optimizer
        self._device_type = device_type
        self._parts: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])

    def begin(self, spec: Optimizer, shards: Sequence[LocalShard], kernels: str) -> TorchOptimizer:
        """Set the clip of the recipe in Megatron, whose step clips, and return its parameter groups."""
        for part in self._parts:
            part.config.clip_grad = spec.clip_norm or 0.0
        return self.optimizer

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""
        self._model.zero_grad_buffer()
        self._chained.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Accumulate into `main_grad`."""
        with stand_in_for_cuda(self._device_type):
            super().backward(loss)

    def gradient(self, shard: LocalShard) -> Tensor | None:
        """Return `main_grad`. Collective for a distributed optimizer: the data-parallel group."""
        part = self._find(shard.tensor)
        gradient: Tensor = shard.tensor.main_grad  # type: ignore[attr-defined]  # set by Megatron's DDP
        if not _is_distributed(part):
            return gradient
        owned = _find_range(part, shard.tensor)
        return _gather(part, shard.tensor, None if owned is None else gradient.view(-1)[owned])

    def norm(self) -> Tensor | None:
        """Return the norm that Megatron computes for its clip, (). Collective: all ranks."""
        with stand_in_for_cuda(self._device_type):
            self._chained.prepare_grads()  # the step prepares them again
            return torch.tensor(self._chained.get_grad_norm())

    def clip(self, shards: Sequence[LocalShard], norm: Tensor, max_norm: float) -> Tensor:
        """Return the coefficient, (), by which Megatron's step scales the gradients."""
        return clip_coefficient(norm, max_norm)

    def step(self) -> None:
        """Clip and perform the step."""
        with stand_in_for_cuda(self._device_type):
            self._chained.step()

    def state(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield moments and step counters. Collective for a distributed optimizer: all ranks."""
        for shard in shards:
            part = self._find(shard.tensor)
            states = _read_state(part, shard.tensor)
            for key in ("exp_avg", "exp_avg_sq"):
                value = states.get(key)
                whole = _gather(part, shard.tensor, value) if _is_distributed(part) else value
                if whole is not None:
                    yield f"{shard.name}.{key}", shard.local(whole), shard.region
            if "step" in states:
                yield f"{shard.name}.step", states["step"], Region.whole(())

    def _find(self, parameter: Tensor) -> Any:
        """Return the chained optimizer that contains a parameter. Experts have their own."""
        for part in self._parts:
            if parameter in _list_parameters(part):
                return part
        raise AssertionError("every parameter is in an optimizer")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], TorchOptimizer],
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    **arguments: Any,
) -> ParallelizedCustomModel:
    """Return a model divided by Megatron: tensor and sequence parallelism over `tp`, and expert parallelism.

    Gradients are all-reduced over `dp_replicate`. Over `dp_shard` the optimizer is distributed. `arguments`
    are further fields of Megatron's DistributedDataParallelConfig. Collective: all ranks.

    Raises: CaseError when `make` did not create the model, an axis or optimizer is not supported, Megatron
    rejects the sizes, or an argument is unknown.
    """
    import_framework("megatron.core", least=LEAST, distribution="megatron-core")
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    _refuse(model, mesh, arguments)
    optimizer = make_optimizer(model)
    if not isinstance(optimizer, torch.optim.AdamW):
        message = f"this adapter of Megatron has no {type(optimizer).__name__}"
        raise CaseError([Problem(message, path="recipe.optimizer.name", remedy="write name: adamw")])
    tp, is_distributed, device = mesh["tp"].size(), mesh["dp_shard"].size() > 1, mesh.device_type
    sizes = {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size or tp,
    }
    with stand_in_for_cuda(device):
        divided = _build_again(model, sizes)
        _copy_parts(model, divided)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed, **arguments)
        wrapped = DistributedDataParallel(divided.config, ddp_config, divided.to(device))
        chained = _make_chained(wrapped, optimizer, is_distributed)
    wrapped.parallel_state = _read_parallel_state()
    optimizer.param_groups[:] = chained.param_groups

    def finalize() -> None:
        with stand_in_for_cuda(device):
            finalize_model_grads([wrapped])

    def accumulate(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else wrapped.no_sync()

    return ParallelizedCustomModel(
        wrapped.train(),
        finalize,
        engine=MegatronLoop(wrapped, optimizer, chained, device),
        numbers_locally=True,  # `local_experts.0` is a different expert on each rank
        accumulate=accumulate,
    )


def _build_again(model: nn.Module, sizes: Mapping[str, int]) -> Any:
    """Return a model for groups of these sizes, and make them the groups of the process.

    Collective: all ranks.

    Raises: CaseError when Megatron rejects the sizes.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    config, of_vocabulary = model.made_of  # type: ignore[misc]  # checked by `_refuse`
    # Megatron trains experts with tensor parallelism only under sequence parallelism.
    sequence = {"sequence_parallel": sizes["tensor_model_parallel_size"] > 1}
    # Megatron keeps global state, and a process divides a model once per program.
    parallel_state.destroy_model_parallel()
    try:
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        return _build(config | sizes | sequence, of_vocabulary)
    except (AssertionError, RuntimeError, ValueError) as error:
        problem = Problem(f"Megatron refuses the layout: {error}", path="layout")
        raise CaseError([problem]) from error


def _make_chained(wrapped: Any, optimizer: TorchOptimizer, is_distributed: bool) -> Any:
    """Return Megatron's chained optimizers of a model, with the options of the recipe's optimizer."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    options = optimizer.defaults
    config = OptimizerConfig(
        optimizer="adam",
        lr=options["lr"],
        adam_beta1=options["betas"][0],
        adam_beta2=options["betas"][1],
        adam_eps=options["eps"],
        weight_decay=max(group["weight_decay"] for group in optimizer.param_groups),
        use_distributed_optimizer=is_distributed,
        params_dtype=torch.float32,
    )
    overrides = get_standard_config_overrides(config)
    chained = get_megatron_optimizer(config, [wrapped], overrides, use_gloo_process_groups=False)
    for group in chained.param_groups:
        # Megatron's OptimizerParamScheduler does the same in every step. Vectors have a `wd_mult` of 0.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return chained


def _refuse(model: nn.Module, mesh: DeviceMesh, arguments: Mapping[str, Any]) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    problems = refuse_unknown_arguments(DistributedDataParallelConfig, arguments)
    problems += refuse_axes(mesh, ("cp",), "Megatron's attention of plain torch does not divide a sequence")
    if mesh["dp_replicate"].size() > 1 and mesh["dp_shard"].size() > 1:
        message = (
            "this adapter of Megatron all-reduces gradients, or distributes the optimizer over all ranks"
        )
        problems.append(Problem(message, path="layout.dp_replicate", remedy="remove it, or layout.dp_shard"))
    if not hasattr(model, "made_of"):
        problems.append(refuse_model(f"{type(model).__name__} was not made by {__name__}", __name__))
    elif any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        message = "Megatron keeps losses, norms and moments in float32"
        problems.append(Problem(message, path="recipe.precision", remedy="write precision: float32"))
    if problems:
        raise CaseError(problems)


def _build(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """Return a GPTModel of plain modules for the groups in Megatron's parallel state."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    activation = {"activation_func": nn.functional.silu} if config.get("gated_linear_unit") else {}
    found = TransformerConfig(**(dict(_PLAIN) | activation | dict(config)))
    layer = get_gpt_layer_local_spec(
        num_experts=found.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=found.qk_layernorm,
        normalization=found.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = MarkedNorm
    attention = layer.submodules.self_attention.submodules
    if found.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = MarkedNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * found.num_layers, layer_norm=MarkedNorm)
    return GPTModel(found, block, position_embedding_type="rope", **sizes)


class MarkedNorm:
    """torch's norm, marked for sequence parallelism like the norms of Apex and TransformerEngine.

    Megatron's own wrapper of torch's norm rejects sequence parallelism (torch_norm.py). Without the mark,
    nothing would sum the gradients of the norm weights over tensor-parallel ranks. It is a class because
    Megatron does not call functions.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        """Return an RMSNorm or LayerNorm for a TransformerConfig."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


@torch.no_grad()
def _copy_parts(whole: nn.Module, divided: Any) -> None:
    """Copy this rank's part of a whole model, by Megatron's partition dim and group and by expert index."""
    from megatron.core import parallel_state

    values = dict(whole.named_parameters())
    tp = parallel_state.get_tensor_model_parallel_group()
    expert_tp = parallel_state.get_expert_tensor_parallel_group()
    for name, parameter in divided.named_parameters():
        value: Tensor = values[_number_expert(name, divided.config.num_moe_experts)]
        group = expert_tp if "local_experts" in name else tp
        if getattr(parameter, "tensor_model_parallel", False) and group.size() > 1:
            # One weight holds gate and up, concatenated. Each half is divided separately.
            is_pair = "linear_fc1" in name and divided.config.gated_linear_unit
            halves = value.chunk(2 if is_pair else 1, parameter.partition_dim)
            value = torch.cat(
                [half.chunk(group.size(), parameter.partition_dim)[group.rank()] for half in halves],
                parameter.partition_dim,
            )
        parameter.copy_(value)


def _number_expert(name: str, num_experts: int | None) -> str:
    """Return the name of a parameter of this rank in the whole model: ranks number their experts from 0."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    first = (num_experts or 0) // group.size() * group.rank()
    return number_globally(name, "local_experts", first)


def _join_one_rank() -> None:
    """Set every group of Megatron's parallel state to the default group, which has a single rank."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name in vars(parallel_state):
        if name.startswith("_") and name.isupper():
            if name.endswith(("_GROUP", "_GROUP_WITH_CP")):
                setattr(parallel_state, name, dist.group.WORLD)
            elif name.endswith(("_RANKS", "_RANKS_WITH_CP")):
                setattr(parallel_state, name, [0])
    parallel_state._set_global_memory_buffer()


def _read_parallel_state() -> dict[str, Any]:
    from megatron.core import parallel_state

    found = vars(parallel_state)
    return {name: found[name] for name in found if name.startswith("_") and name.isupper()}


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "model_param_gbuf_map")


def _list_parameters(optimizer: Any) -> set[Tensor]:
    """Return the model parameters of an optimizer, including those without elements on this rank."""
    if _is_distributed(optimizer):
        return {each for buffer in optimizer.buffers for each in buffer.params}
    return {each for group in optimizer.param_groups for each in group["params"]}


def _find_range(optimizer: Any, parameter: Tensor) -> slice | None:
    """Return the elements of a parameter that this rank's distributed optimizer holds, or None."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    owned = optimizer._get_model_param_range_map(parameter)["param"]
    return slice(owned.start, owned.end)


def _read_state(optimizer: Any, parameter: Tensor) -> Mapping[str, Tensor]:
    if not _is_distributed(optimizer):
        found: Mapping[str, Tensor] = optimizer.optimizer.state.get(parameter, {})
        return found
    if _find_range(optimizer, parameter) is None:
        return {}
    states: Mapping[str, Tensor] = optimizer._get_main_param_and_optimizer_states(parameter)
    return states


def _gather(optimizer: Any, parameter: Tensor, owned: Tensor | None) -> Tensor:
    """Return a whole tensor of a parameter's shape from the ranges of a data-parallel group."""
    whole = torch.zeros(parameter.numel(), device=parameter.device)
    if owned is not None:
        whole[_find_range(optimizer, parameter)] = owned.view(-1).float()
    dist.all_reduce(whole, group=optimizer.data_parallel_group)
    return whole.view(parameter.shape)
