"""Gradients of ranks under picotron's context parallelism without data parallelism.

Run as `python reproduce.py PICOTRON`, a checkout of huggingface/picotron. 2 ranks, gloo.
Exits with 1 when the two ranks have different gradients of one parameter; with 0 otherwise.
"""

import os
import sys
import textwrap
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, PORT = 2, "29552"
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


def wrap(model, picotron):
    """Wrap a model by the lines of train.py between its making and its first use."""
    import picotron.process_group_manager as pgm
    from picotron.context_parallel.context_parallel import apply_context_parallel
    from picotron.data_parallel.data_parallel import DataParallelBucket

    source = (Path(picotron) / "train.py").read_text()
    first = source.index("    if pgm.process_group_manager.cp_world_size > 1:\n        model = apply_")
    lines = source[first : source.index('    print(f"init model parallel time')]
    names = {"pgm": pgm, "apply_context_parallel": apply_context_parallel, "model": model}
    names |= {"DataParallelBucket": DataParallelBucket, "dtype": torch.float32, "device": "cpu"}
    exec(textwrap.dedent(lines), names)
    return names["model"]


def run(rank, picotron, wrong):
    start(rank, picotron, cp_size=RANKS)
    from picotron.model import Llama

    model = wrap(Llama(CONFIG), picotron)
    tokens = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(1))
    mine = slice(rank * 8, rank * 8 + 8)
    logits = model(input_ids=tokens[:, :-1][:, mine])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, mine].flatten()).backward()
    names = ["decoder_layers.0.attention.q_proj.weight", "decoder_layers.1.mlp.up_proj.weight"]
    for name, parameter in model.named_parameters():
        grads = [torch.empty_like(parameter) for _ in range(RANKS)]
        dist.all_gather(grads, parameter.grad)
        wrong.value |= not torch.equal(*grads)
        if rank == 0 and name.removeprefix("module.") in names:
            print(
                f"{name}: gradient norm", *(f"{g.norm():.5f}" for g in grads), "on ranks 0 and 1", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    wrong = mp.get_context("spawn").Value("i", 0)
    mp.spawn(run, (str(Path(sys.argv[1]).resolve()), wrong), nprocs=RANKS)
    sys.exit(wrong.value)
