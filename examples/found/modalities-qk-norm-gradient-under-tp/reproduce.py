"""Gradients of the norms of queries and keys in Modalities' GPT under its tensor parallelism.

Needs modalities. Two ranks, gloo, float32. Exits with 1 when a gradient differs; with 0 otherwise.
"""

import logging
import os
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from modalities.models.gpt2.gpt2_model import GPT2LLMConfig
from modalities.models.model_factory import GPT2ModelFactory
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

RANKS, PORT, WIDTH, HEADS = 2, "29559", 128, 4
ROTARY = {"n_embd": WIDTH, "n_head": HEADS, "seq_length_dim": -2, "base_freq": 10000}


def describe_norm(width):
    return {"norm_type": "pytorch_rms_norm", "config": {"normalized_shape": width, "eps": 1e-5}}


FIELDS = {
    "sample_key": "tokens",
    "prediction_key": "logits",
    "poe_type": "NOPE",
    "sequence_length": 16,
    "vocab_size": 128,
    "n_layer": 1,
    "n_head_q": HEADS,
    "n_head_kv": 2,
    "n_embd": WIDTH,
    "ffn_hidden": WIDTH,
    "dropout": 0.0,
    "bias": False,
    "attention_config": {
        "qkv_transforms": [{"type_hint": "RotaryTransform", "config": ROTARY}],
        "qk_norm_config": describe_norm(WIDTH // HEADS),
    },
    "attention_implementation": "pytorch_flash",
    "activation_type": "swiglu",
    "attention_norm_config": describe_norm(WIDTH),
    "ffn_norm_config": describe_norm(WIDTH),
    "lm_head_norm_config": describe_norm(WIDTH),
    "use_weight_tying": False,
}


def make():
    torch.manual_seed(0)
    return GPT2ModelFactory.get_gpt2_model(**dict(GPT2LLMConfig(**FIELDS)))


def run(rank, wrong):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    drawn = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 128, (2, 4, 16), generator=drawn)
    whole = make()
    cross_entropy(whole(tokens).flatten(0, 1), targets.flatten()).backward()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = GPT2ModelFactory.get_gpt2_tensor_parallelized_model(make(), mesh)
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    for name, parameter in model.named_parameters():
        right, grad = whole.get_parameter(name).grad, parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        if "q_norm" in name or "k_norm" in name:
            both = [torch.empty_like(right) for _ in range(RANKS)]
            dist.all_gather(both, grad)
            errors = [f"{(each - right).norm() / right.norm():.4f}" for each in (*both, sum(both))]
            wrong.value |= bool((grad - right).norm() / right.norm() > 1e-3)
            if rank == 0:
                said = f"error of the gradient on rank 0 {errors[0]}, on rank 1 {errors[1]}"
                print(f"{name}: {said}, of their sum {errors[2]}", flush=True)
        elif (grad - right).norm() / right.norm() > 1e-3:
            print(f"{name}: differs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, "modalities", version("modalities"), flush=True)
    wrong = mp.get_context("spawn").Value("i", 0)
    mp.spawn(run, (wrong,), nprocs=RANKS)
    sys.exit(wrong.value)
