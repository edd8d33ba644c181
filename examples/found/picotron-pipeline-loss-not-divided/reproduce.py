"""Gradients of picotron's pipeline with 1 and with 2 micro-batches of the same rows.

Run as `python reproduce.py PICOTRON`, a checkout of huggingface/picotron. 2 ranks, gloo.
Exits with 1 when they differ; with 0 otherwise.
"""

import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, PORT = 2, "29551"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
CONFIG = types.SimpleNamespace(**SIZES, **HEADS, rms_norm_eps=1e-5, rope_theta=10000.0)


def start(rank, picotron, **degrees):
    """What train.py does before it makes the model; flash_attn and CUDA are named there and not used."""
    sys.path.insert(0, picotron)
    os.environ.update(DEVICE="cpu", DTYPE="float32", FLASH_ATTEN="0", LOCAL_RANK=str(rank), RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    torch.cuda.synchronize = lambda: None
    names = {"flash_attn_interface": "flash_attn_func", "layers.rotary": "apply_rotary_emb"}
    names |= {"ops.triton.layer_norm": "layer_norm_fn", "layers": "", "ops": "", "ops.triton": "", "": ""}
    for name, function in names.items():
        module = types.ModuleType(f"flash_attn.{name}".rstrip("."))
        setattr(module, function or "unused", None)
        sys.modules[module.__name__] = module
    dist.init_process_group("gloo")
    import picotron.process_group_manager as pgm

    pgm.setup_process_group_manager(**({"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_size": 1} | degrees))
    torch.manual_seed(0)


class Rows:
    """The same four rows as a number of micro-batches, in the form of picotron's data loader."""

    def __init__(self, micro_batches):
        self.grad_acc_steps = micro_batches
        tokens = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(1))
        self.parts = iter(tokens.chunk(micro_batches))

    def __next__(self):
        part = next(self.parts)
        batch = {"input_ids": part[:, :-1], "target_ids": part[:, 1:].contiguous()}
        return batch | {"position_ids": torch.arange(16), "hidden_states": None}


def run(rank, picotron, wrong):
    start(rank, picotron, pp_size=RANKS)
    from picotron.model import Llama
    from picotron.pipeline_parallel import pipeline_parallel as pp

    model = pp.PipelineParallel(Llama(CONFIG), CONFIG)
    for schedule in (pp.train_step_pipeline_afab, pp.train_step_pipeline_1f1b):
        norms = []
        for parts in (1, 2):
            model.zero_grad()
            schedule(model, Rows(parts), (4 // parts, 16, 32), torch.device("cpu"), torch.float32)
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        wrong.value |= abs(norms[1] / norms[0] - 1) > 1e-3
        said = f"gradient norm {norms[0]:.5f} as 1 micro-batch, {norms[1]:.5f} as 2"
        print(f"{schedule.__name__}, stage {rank}: {said}, ratio {norms[1] / norms[0]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    wrong = mp.get_context("spawn").Value("i", 0)
    mp.spawn(run, (str(Path(sys.argv[1]).resolve()), wrong), nprocs=RANKS)
    sys.exit(wrong.value)
