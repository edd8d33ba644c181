"""Gradients of megatron-core's experts under tensor without expert parallelism. Needs megatron-core.

Exits with 1 when the gradients of experts that two tensor-parallel ranks share differ from those of one rank;
with 0 otherwise. Runs on CPUs: megatron-core's direct calls of CUDA are replaced first.
"""

import os
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig


def replace_cuda():
    """Let megatron-core run on CPUs: replace devices, and random states that dropout would use."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    vars(moe_utils).setdefault(
        "te_general_gemm", None
    )  # without TransformerEngine its router has a NameError


def compute_gradients(tp):
    """Return the finished gradients of one MoE layer, by name; each rank has its part of the sequence."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=8,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    layer = MoELayer(config, spec.submodules, layer_number=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    hidden = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(1))
    output, _ = model(hidden.chunk(tp)[dist.get_rank()])
    output.square().sum().backward()
    finalize_model_grads([model])
    found = {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}
    parallel_state.destroy_model_parallel()
    return found


def run(rank, num_ranks, folder):
    """Save the gradients of one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29551 + num_ranks))
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    replace_cuda()
    torch.save(compute_gradients(num_ranks), f"{folder}/{num_ranks}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    print("torch", torch.__version__, "megatron-core", version("megatron-core"))
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (1, 2):
            mp.spawn(run, (num_ranks, folder), nprocs=num_ranks)
        whole, first, second = (torch.load(f"{folder}/{name}.pt") for name in ("1-0", "2-0", "2-1"))
    num_wrong = 0
    for name, expected in whole.items():
        error = float((first[name] - expected).norm() / expected.norm())
        of_sum = float((first[name] + second[name] - expected).norm() / expected.norm())
        num_wrong += error > 1e-4
        print(f"{name}: error on rank 0 {error:.2g}, of the sum over both ranks {of_sum:.2g}")
    sys.exit(num_wrong > 0)
