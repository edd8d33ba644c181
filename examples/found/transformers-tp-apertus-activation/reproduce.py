"""Gradients of Apertus' activation parameters (xIELU) under tensor parallelism. Needs transformers.

Exits with 1 when a gradient differs from one device's, or between ranks; with 0 otherwise.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import ApertusConfig, ApertusForCausalLM, set_seed
from transformers.distributed import DistributedConfig

RANKS, PORT = 2, "29533"


def gradients(model, batch):
    model(input_ids=batch, labels=batch).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def run(rank, folder, wrong):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    batch = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    config = DistributedConfig(tp_size=RANKS)
    expected = gradients(ApertusForCausalLM.from_pretrained(folder, dtype=torch.float64), batch)
    sharded = ApertusForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config)
    actual = gradients(sharded, batch)
    for name, right in expected.items():
        # Each rank's own value: a gradient of a replicated parameter must be the same on all.
        ranks = [torch.empty_like(right) for _ in range(RANKS)]
        dist.all_gather(ranks, actual[name].contiguous())
        if max((g - right).norm() / right.norm() for g in ranks) > 1e-9:
            wrong.value = 1
            if rank == 0:
                values = ", ".join(f"{g.flatten()[0]:.6g}" for g in ranks)
                print(
                    f"{name}: expected {right.flatten()[0]:.6g} actual {values} on ranks 0 and 1", flush=True
                )
    if rank == 0:
        print(f"{len(expected)} gradients compared", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print("torch", torch.__version__, "transformers", transformers.__version__)
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        ApertusForCausalLM(ApertusConfig(**sizes, **heads)).save_pretrained(folder)
        mp.spawn(run, (folder, wrong), nprocs=RANKS)
    sys.exit(wrong.value)
