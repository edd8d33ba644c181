"""Gradients of q_norm and k_norm under tensor parallelism, with 1, 2 and 4 micro-batches. Needs transformers.

Exits with 1 when a gradient differs from one device's by more than rounding, with 0 when none does.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed
from transformers.distributed import DistributedConfig

RANKS, PORT = 2, "29531"


def accumulate(model, batch, num_micro_batches):
    model.zero_grad(set_to_none=True)
    for part in batch.chunk(num_micro_batches):
        (model(input_ids=part, labels=part).loss / num_micro_batches).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def run(rank, folder, wrong):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    single = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64)
    config = DistributedConfig(tp_size=RANKS)
    sharded = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config)
    batch = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(1))
    for n in (1, 2, 4):
        expected, actual = accumulate(single, batch, n), accumulate(sharded, batch, n)
        for name, right in expected.items():
            error = ((actual[name] - right).norm() / right.norm()).item()
            if error > 1e-9:
                wrong.value = 1
                if rank == 0:
                    sizes = f"norm expected {right.norm():.5f} actual {actual[name].norm():.5f}"
                    print(f"{n} micro-batches: {name}: {sizes}, relative error {error:.2g}")
        if rank == 0:
            print(f"{n} micro-batches: {len(expected)} gradients compared", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print("torch", torch.__version__, "transformers", transformers.__version__)
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
        mp.spawn(run, (folder, wrong), nprocs=RANKS)
    sys.exit(wrong.value)
