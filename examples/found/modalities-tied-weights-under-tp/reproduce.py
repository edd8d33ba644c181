"""Tied weights of Modalities' GPT under its tensor parallelism, against one device.

Needs modalities. Two ranks, gloo, float32. Exits with 1 when the weights are no longer tied; with 0 otherwise.
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

RANKS, PORT, WIDTH = 2, "29557", 128
NORM = {"norm_type": "pytorch_rms_norm", "config": {"normalized_shape": WIDTH, "eps": 1e-5}}
ROTARY = {"n_embd": WIDTH, "n_head": 4, "seq_length_dim": -2, "base_freq": 10000}
FIELDS = {
    "sample_key": "tokens",
    "prediction_key": "logits",
    "poe_type": "NOPE",
    "sequence_length": 16,
    "vocab_size": 128,
    "n_layer": 1,
    "n_head_q": 4,
    "n_head_kv": 2,
    "n_embd": WIDTH,
    "ffn_hidden": WIDTH,
    "dropout": 0.0,
    "bias": False,
    "attention_config": {"qkv_transforms": [{"type_hint": "RotaryTransform", "config": ROTARY}]},
    "attention_implementation": "pytorch_flash",
    "activation_type": "swiglu",
    "attention_norm_config": NORM,
    "ffn_norm_config": NORM,
    "lm_head_norm_config": NORM,
    "use_weight_tying": True,
}


def make():
    torch.manual_seed(0)
    return GPT2ModelFactory.get_gpt2_model(**dict(GPT2LLMConfig(**FIELDS)))


def train(model, tokens, targets):
    """Make one step of SGD. Return the weights of embedding and head after it, and their gradients."""
    ends = [model.transformer.wte, model.transformer.lm_head]
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    weights = [end.weight.detach() for end in ends]
    grads = [end.weight.grad for end in ends]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in (*weights, *grads)]


def run(rank, wrong):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    drawn = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 128, (2, 4, 16), generator=drawn)
    _, _, expected, _ = train(make(), tokens, targets)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    divided = GPT2ModelFactory.get_gpt2_tensor_parallelized_model(make(), mesh)
    is_tied = divided.transformer.wte.weight is divided.transformer.lm_head.weight
    wte, head, wte_grad, head_grad = train(divided, tokens, targets)
    errors = [f"{(grad - expected).norm() / expected.norm():.4f}" for grad in (wte_grad, head_grad)]
    wrong.value |= not is_tied
    if rank == 0:
        print(f"wte.weight is lm_head.weight: {is_tied}")
        print(f"error of the gradient of wte {errors[0]}, of lm_head {errors[1]}")
        both = (wte_grad + head_grad - expected).norm() / expected.norm()
        print(f"error of the sum of both gradients {both:.4f}")
        print(
            f"largest difference of wte and lm_head after one step {(wte - head).abs().max():.6f}", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, "modalities", version("modalities"), flush=True)
    wrong = mp.get_context("spawn").Value("i", 0)
    mp.spawn(run, (wrong,), nprocs=RANKS)
    sys.exit(wrong.value)
