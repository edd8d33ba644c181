"""Gradients of OLMo-core's experts under expert parallelism with FSDP, against those of one device.

Needs ai2-olmo-core. Two ranks, gloo, float32. Exits with 1 when a gradient differs; with 0 otherwise.
"""

import os
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.ops import moe as ops
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

RANKS, PORT = 2, "29554"


def gather(x, indices, bin_ids, bins, top_k):
    return x[indices.long() // top_k]


def scatter(x, indices, bin_ids, weights, bins, top_k):
    if weights is not None:
        x = x * weights.reshape(-1)[indices.long()].unsqueeze(-1)
    return x.new_zeros(x.shape[0] // top_k, x.shape[1]).index_add(0, indices.long() // top_k, x)


def make():
    torch.manual_seed(0)
    moe = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 32, "dropless": True}
    sizes = {"d_model": 64, "vocab_size": 96, "n_layers": 2, "n_heads": 4}
    no_loss = {"lb_loss_weight": None, "z_loss_weight": None}
    model = TransformerConfig.llama_like_moe(**sizes, **moe, **no_loss).build(init_device="cpu")
    for parameter in model.parameters():
        if parameter.ndim > 1 or parameter.numel() == 4 * 64:  # the router's weight is flat
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def run(rank, wrong):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    ops.gather, ops.scatter = gather, scatter  # Triton kernels, which need CUDA
    dist.init_process_group("gloo")
    drawn = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 96, (2, 4, 8), generator=drawn)
    whole = make()
    cross_entropy(whole(tokens).flatten(0, 1), targets.flatten()).backward()
    model = make()
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp_replicate", "dp_shard"))
    dtypes = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    model.apply_ep(mesh["dp_shard"])  # the three calls of parallelize_model, in its order
    model.prepare_experts_for_fsdp(mesh, **dtypes)
    model.apply_fsdp(mesh["dp_replicate", "dp_shard"], **dtypes)
    mine = slice(rank * 2, rank * 2 + 2)
    cross_entropy(model(tokens[mine]).flatten(0, 1), targets[mine].flatten()).backward()
    for name, parameter in model.named_parameters():
        right, grad = whole.get_parameter(name).grad, parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        ratio = ((grad * right).sum() / (right * right).sum()).item()
        wrong.value |= abs(ratio - 1) > 1e-3
        if rank == 0 and ".0." in name and ("experts" in name or "router" in name):
            print(f"{name}: {ratio:.5f} times the gradient of one device", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, "olmo_core", version("ai2-olmo-core"))
    wrong = mp.get_context("spawn").Value("i", 0)
    mp.spawn(run, (wrong,), nprocs=RANKS)
    sys.exit(wrong.value)
