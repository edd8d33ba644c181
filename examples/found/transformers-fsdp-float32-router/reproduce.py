"""Families with routers in float32, in bfloat16 under FSDP2 of transformers. Needs transformers.

Exits with 1 when a training step that works for another family is refused, with 0 when all run.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
)
from transformers.distributed import DistributedConfig

RANKS, PORT = 2, "29543"
SIZES = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
ERNIE = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16}
HUNYUAN = {"num_experts": 8, "moe_topk": 2}
FAMILIES = (
    (Ernie4_5_MoeForCausalLM, Ernie4_5_MoeConfig, ERNIE),
    (HunYuanMoEV1ForCausalLM, HunYuanMoEV1Config, HUNYUAN),
)


def run(rank, folders, wrong):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    tokens = torch.arange(32).view(2, 16) + rank
    for (family, _, _), folder in zip(FAMILIES, folders, strict=True):
        model = family.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=2), dtype=torch.bfloat16
        )
        kept = [name for name, each in model.named_parameters() if each.dtype == torch.float32]
        try:
            model(tokens, labels=tokens).loss.backward()
            actual = "runs"
        except AssertionError as error:
            actual, wrong.value = f"AssertionError: {str(error)[:100]}", 1
        print(f"rank {rank}, {family.__name__}: expected runs, actual {actual}", flush=True)
        if rank == 0:
            print("  in float32:", ", ".join(kept), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print("torch", torch.__version__, "transformers", transformers.__version__)
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for (family, config, fields), folder in zip(FAMILIES, (first, second), strict=True):
            family(config(**SIZES, **HEADS, **fields)).to(torch.bfloat16).save_pretrained(folder)
        mp.spawn(run, ((first, second), wrong), nprocs=RANKS)
    sys.exit(wrong.value)
