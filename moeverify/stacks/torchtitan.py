"""torchtitan: its decoders under its own `parallelize_*` functions, over tp, dp_shard, dp_replicate and ep.

torchtitan stores the shardings in the configuration of a model before it builds the model. Under a layout
the model is therefore built again from its configuration on the meta device, and divided by the function of
its ModelSpec. Each rank then copies its part of the whole model's weights. Loss, clip and norm are
torchtitan's. A case names functions of this module:

    recipe:
      model:
        factory: moeverify.stacks.torchtitan:make
        arguments: {spec: "torchtitan.models.qwen3:model_registry", flavor: debugmodel_moe, layers: 2}
        loss: moeverify.stacks.torchtitan:loss
        vocab_size: 2048
    layout:
      dp_shard: 2
      parallelize: "moeverify.stacks.torchtitan:parallelize"
      arguments: {expert_parallel_degree: 2}
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moeverify.errors import CaseError, Problem
from moeverify.parallel.regions.local_shard import buffers, parameters
from moeverify.stacks.constants import offset_constants
from moeverify.stacks.framework import import_framework, refuse_axes, refuse_model, refuse_unknown_arguments
from moeverify.stacks.kept_precision import KeptPrecision
from moeverify.stacks.loop import FrameworkLoop
from moeverify.train.parallelize_custom import ParallelizedCustomModel
from moeverify.train.target import resolve

# The first release whose models store their shardings in their configuration.
LEAST = "0.3.0"
LAYERS = 2
"""The layers that `moeverify init` keeps: a dense one and one of experts, where the model has both."""
EXPERTS = 8
_EXPERT_WIDTH = 64
# The first one is the default. torchtitan's own default, `spmd_types`, marks plain tensors, which FSDP2 of
# torch 2.13.0 rejects. `full_dtensor` requires inputs and targets as DTensors, which moeverify's loop does
# not create.
BACKENDS = ("partial_dtensor", "spmd_types")
_SIZES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
}


def find_arguments(target: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `make` for the smallest model of a package of torchtitan, and those `given`.

    `target` names anything in it, such as `torchtitan.models.qwen3.model:Qwen3Model`: the nearest package
    above with a `model_registry` gives the function, and its table of flavors the names to choose from.
    Fields that `target` leaves open are those of `make`.

    Raises: CaseError when no such package is found.
    """
    module = target.partition(":")[0]
    while "." in module:
        package = vars(importlib.import_module(module))
        tables = [
            each for name, each in package.items() if name.endswith("_configs") and isinstance(each, dict)
        ]
        if "model_registry" in package and tables:
            spec = f"{module}:model_registry"
            counts = {name: _count_parameters(package["model_registry"], name) for name in tables[0]}
            flavor = given.get("flavor") or min(counts, key=lambda name: counts[name])
            layers = package["model_registry"](flavor).model.layers
            few = {"experts": EXPERTS} if any(_find_experts(each) for each in layers) else {}
            return {"spec": spec, "flavor": flavor, "layers": LAYERS, **few, **given}
        module = module.rpartition(".")[0]
    message = f"no package around `{target}` has a `model_registry`"
    raise CaseError(
        [
            Problem(
                message, path="PKG.MOD:NAME", remedy="name a model such as torchtitan.models.qwen3:Qwen3Model"
            )
        ]
    )


def _count_parameters(registry: Callable[[str], Any], flavor: str) -> float:
    """Return the number of parameters of a flavor, or infinity if it cannot be made."""
    try:
        with torch.device("meta"):
            built = registry(flavor).model.build()
    except Exception:  # a flavor that needs more than its name, or another machine
        return math.inf
    return float(sum(each.numel() for each in built.parameters()))


def make(
    spec: str, *, layers: int | None = None, experts: int = 0, spread: float = 0.1, **arguments: Any
) -> nn.Module:
    """Return the whole decoder of a ModelSpec, with its initial weights and its attention in plain torch.

    `spec` names a function that returns a ModelSpec for `arguments`, such as the `model_registry` of
    torchtitan's models, which takes a `flavor`. Only the first `layers` layers are kept. With `experts`, a
    layer has that many narrow experts, and a token a quarter of them. Attention is causal over whole rows:
    torchtitan's masks for packed documents need FlexAttention, which has no backward pass on CPUs. Constant
    tensors, including saved buffers such as router biases, get random offsets of scale `spread`.

    Raises: CaseError when the function does not return a ModelSpec of a decoder.
    """
    import_framework("torchtitan", least=LEAST, path="recipe.model.factory")
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.decoder import Decoder

    found = resolve(spec, "recipe.model.arguments.spec")(**arguments)
    config = getattr(found, "model", None)
    if not isinstance(config, Decoder.Config):
        message = f"`{spec}` returned {type(found).__name__} and no ModelSpec of a decoder"
        remedy = "name a function such as torchtitan.models.qwen3:model_registry, which takes a flavor"
        raise CaseError([Problem(message, path="recipe.model.arguments.spec", remedy=remedy)])
    config = copy.deepcopy(config)
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if experts and (found_experts := _find_experts(layer)):
            _reduce_experts(found_experts, experts)
    model: nn.Module = config.build()
    with torch.no_grad():
        model.init_states()  # type: ignore[operator]  # defined by torchtitan's Module
    offset_constants([*model.parameters(), *_list_saved_buffers(model)], spread)
    model.parallelize_fn = found.parallelize_fn  # for `parallelize`, which has no spec
    return model


def _find_experts(layer: Any) -> Any:
    """Return the configuration of the experts in that of a layer, or None."""
    return getattr(layer, "moe", None)


def _reduce_experts(moe: Any, count: int) -> None:
    """Change the configuration of a layer's experts to few narrow ones."""
    inner, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
    for part in (moe, moe.router, inner, dispatcher):
        part.num_experts = count
    for part in (moe.router, dispatcher):
        part.top_k = max(1, count // 4)
    moe.router.gate.out_features = count
    inner.hidden_dim = _EXPERT_WIDTH


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return torchtitan's cross entropy summed over the valid tokens, ().

    Over tp the vocabulary is sharded.
    """
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import utils

    dims = getattr(model, "parallel_dims", None)
    config: Any = getattr(model, "module", model).config  # inside of DDP's wrapper
    # The backend is global, and the process of a layout also trains goldens.
    utils.set_spmd_backend(dims.spmd_backend if dims else "partial_dtensor")
    with _surround(dims):
        found: Tensor = cross_entropy_loss(model(tokens), targets, global_vocab_size=config.vocab_size)
    return found


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer],
    expert_parallel_degree: int = 1,
    **arguments: Any,
) -> ParallelizedCustomModel:
    """Return a decoder divided by its ModelSpec, with a loop that clips like torchtitan's trainer.

    `arguments` are further fields of torchtitan's ParallelismConfig, such as `spmd_backend` and
    `enable_sequence_parallel`. They override the sizes of the mesh. Collective: all
    ranks.

    Raises: CaseError when `make` did not create the model, an axis is not supported, or an argument is
    unknown.
    """
    import_framework("torchtitan", least=LEAST)
    from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import parallel_dims, utils

    _refuse(model, mesh, arguments)
    sizes = {field: mesh[axis].size() for axis, field in _SIZES.items()}
    sizes["expert_parallel_degree"] = expert_parallel_degree
    parallelism = ParallelismConfig(**{"spmd_backend": BACKENDS[0]} | sizes | arguments)
    parallel_dims.device_type = mesh.device_type  # torchtitan assumes that every machine has GPUs
    dims = parallel_dims.ParallelDims.from_config(parallelism, dist.get_world_size())
    utils.set_spmd_backend(parallelism.spmd_backend)
    dims.build_mesh()
    dtype = next(model.parameters()).dtype
    TORCH_DTYPE_MAP.setdefault("float64", torch.float64)
    name = next(name for name, value in TORCH_DTYPE_MAP.items() if value == dtype)
    with _surround(dims):
        divided = model.parallelize_fn(  # type: ignore[operator]  # set by `make`
            _build_again(model, parallelism, dtype),
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=name, mixed_precision_reduce=name),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        divided.to_empty(device=mesh.device_type)
        with torch.no_grad():
            divided.init_states()
            _copy_values(model, divided)
    divided.parallel_dims = dims

    def backward(total: Tensor) -> None:
        with _surround(dims):
            # torchtitan sums the gradients of ranks; moeverify's loop expects means.
            (total / (dims.dp_replicate * dims.dp_shard)).backward()

    def clip_by_norm(limit: float) -> Any:
        return utils.clip_grad_norm_(divided.parameters(), limit, foreach=True, ep_enabled=dims.ep_enabled)

    optimizer = make_optimizer(divided)
    engine = FrameworkLoop(optimizer, optimizer, backward, clip_by_norm)
    return ParallelizedCustomModel(divided.train(), engine=engine, accumulate=_reduce_each_time)


def _refuse(model: nn.Module, mesh: DeviceMesh, arguments: dict[str, Any]) -> None:
    from torchtitan.config import ParallelismConfig

    problems = refuse_unknown_arguments(ParallelismConfig, arguments)
    problems += refuse_axes(
        mesh, ("cp",), "this adapter of torchtitan has no positions to divide a sequence by"
    )
    backend = arguments.get("spmd_backend", BACKENDS[0])
    if backend not in BACKENDS:
        path = "layout.arguments.spmd_backend"
        problems.append(
            Problem(f"`{backend}` is no backend", path=path, remedy=f"write {' or '.join(BACKENDS)}")
        )
    if not hasattr(model, "parallelize_fn"):
        problems.append(refuse_model(f"{type(model).__name__} was not made of a ModelSpec", __name__))
    if problems:
        raise CaseError(problems)


def _build_again(model: nn.Module, parallelism: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model with the shardings of a ParallelismConfig, on the meta device.

    Raises: CaseError when torchtitan rejects the sizes.
    """
    config: Any = copy.deepcopy(model.config)
    try:
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    except (ValueError, NotImplementedError) as error:
        raise CaseError([Problem(f"torchtitan refuses the layout: {error}", path="layout")]) from error
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            built: nn.Module = config.build()
    finally:
        torch.set_default_dtype(before)
    return built


def _copy_values(whole: nn.Module, divided: nn.Module) -> None:
    """Copy this rank's part of a whole model, by the names that torchtitan saves weights under."""
    values = {shard.name: shard.local() for shard in (*parameters(whole), *buffers(whole))}
    for shard in (*parameters(divided), *buffers(divided)):
        shard.local().copy_(shard.region.take(values[shard.name]))


def _surround(dims: Any) -> AbstractContextManager[object]:
    """Return the context of torchtitan's trainer around its passes, without rounding.

    None is a single device.
    """
    from torchtitan.distributed import utils

    stack = ExitStack()
    stack.enter_context(KeptPrecision())
    if dims is not None:
        stack.enter_context(utils.get_spmd_context(parallel_dims=dims)())
    return stack


def _reduce_each_time(last: bool) -> AbstractContextManager[object]:
    """Return an empty context: torchtitan reduces the gradients of every micro-batch."""
    return nullcontext()


def _list_saved_buffers(model: nn.Module) -> list[Tensor]:
    saved = model.state_dict()
    return [buffer for name, buffer in model.named_buffers() if name in saved]
