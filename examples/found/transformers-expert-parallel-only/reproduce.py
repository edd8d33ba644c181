"""Expert parallelism alone, in the form that DistributedConfig documents. Needs transformers.

Exits with 1 when a documented configuration is refused, with 0 when all load.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.distributed import DistributedConfig

RANKS, PORT = 2, "29535"
CONFIGS = (
    {"tp_size": 2, "ep_size": 2},
    {"tp_size": 2, "ep_size": 2, "tp_plan": {}},
    {"tp_size": 2, "enable_expert_parallel": True},
)


def run(rank, folder, wrong):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    for sizes in CONFIGS:
        try:
            OlmoeForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
            actual = "loads"
        except ValueError as error:
            actual, wrong.value = f"ValueError: {str(error)[:90]} ...", 1
        if rank == 0:
            print(f"{sizes}: expected loads, actual {actual}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print("torch", torch.__version__, "transformers", transformers.__version__)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        OlmoeForCausalLM(OlmoeConfig(**sizes, **heads)).save_pretrained(folder)
        mp.spawn(run, (folder, wrong), nprocs=RANKS)
    sys.exit(wrong.value)
