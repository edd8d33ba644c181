"""GPT-OSS with its eager experts over the ranks of an expert group with a shared batch. Needs transformers.

Exits with 1 when a forward pass that works for another family is refused, with 0 when all run.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

RANKS, PORT = 2, "29541"
SIZES = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 96, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
FAMILIES = ((MixtralForCausalLM, MixtralConfig), (GptOssForCausalLM, GptOssConfig))


def run(rank, folders, wrong):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    tokens = torch.arange(32).view(2, 16)
    for (family, _), folder in zip(FAMILIES, folders, strict=True):
        config = DistributedConfig(
            tp_size=2, ep_size=2
        )  # ep_implementation="auto": all_reduce without gradients
        model = family.from_pretrained(
            folder,
            distributed_config=config,
            experts_implementation="eager",
            attn_implementation="eager",
        )
        try:
            with torch.no_grad():
                model(tokens)
            actual = "runs"
        except RuntimeError as error:
            actual, wrong.value = f"RuntimeError: {str(error)[:90]}", 1
        print(f"rank {rank}, {family.__name__}: expected runs, actual {actual}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print("torch", torch.__version__, "transformers", transformers.__version__)
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for (family, config), folder in zip(FAMILIES, (first, second), strict=True):
            family(config(**SIZES, **HEADS, **EXPERTS)).save_pretrained(folder)
        mp.spawn(run, ((first, second), wrong), nprocs=RANKS)
    sys.exit(wrong.value)
