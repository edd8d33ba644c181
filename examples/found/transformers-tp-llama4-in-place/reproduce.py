"""One training step of Llama 4's mixture layers under tensor parallelism.

Needs transformers. Two ranks, gloo. Exits with 1 when it raises; with 0 otherwise.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

RANKS, PORT = 2, "29556"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
EAGER = {"attn_implementation": "eager"}


def run(rank, folder, wrong):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(transformers.logging.ERROR)
    tokens = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    for degree in (1, RANKS):
        plan = DistributedConfig(tp_size=degree) if degree > 1 else None
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan, **EAGER)
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            said = f"loss {loss:.4f}"
        except RuntimeError as error:
            said = f"{type(error).__name__}: {str(error)[:68]}"
            wrong.value = 1
        if rank == 0:
            print(f"tp {degree}: {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, "transformers", transformers.__version__)
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama4_text"](**SIZES, **HEADS, num_local_experts=4, intermediate_size_mlp=64)
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, **EAGER).save_pretrained(folder)
        mp.spawn(run, (folder, wrong), nprocs=RANKS)
    sys.exit(wrong.value)
