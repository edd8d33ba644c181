"""Weights fused in the checkpoint and separate in the model, loaded under FSDP and TP. Needs transformers.

HRM-Text keeps gate, q, k and v in one tensor on disk. No training: from_pretrained alone is compared. Exits
with 1 when a loaded weight differs from one device's load of the same folder, with 0 otherwise.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import HrmTextConfig, HrmTextForCausalLM, set_seed
from transformers.distributed import DistributedConfig

RANKS, PORT = 2, "29534"


def run(rank, folder, wrong):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    expected = dict(HrmTextForCausalLM.from_pretrained(folder).named_parameters())
    for sizes in ({"fsdp_size": RANKS}, {"tp_size": RANKS}):
        model = HrmTextForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
        bad = []
        for name, p in model.named_parameters():
            actual = p.full_tensor() if hasattr(p, "full_tensor") else p
            if not torch.equal(actual, expected[name]):
                bad.append((name, expected[name][0, :3].tolist(), actual[0, :3].tolist()))
        wrong.value |= bool(bad)
        if rank == 0:
            print(f"{sizes}: {len(bad)} of {len(expected)} weights differ from what one device loads")
            for name, right, got in bad[:4]:
                print(f"  {name}[0, :3]: expected {right} actual {got}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print("torch", torch.__version__, "transformers", transformers.__version__)
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "head_dim": 8, "H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1]}
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        HrmTextForCausalLM(HrmTextConfig(**sizes, **heads)).save_pretrained(folder)
        mp.spawn(run, (folder, wrong), nprocs=RANKS)
    sys.exit(wrong.value)
