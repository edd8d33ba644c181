"""Initial weights of picotron's tensor-parallel shards and pipeline stages.

Run as `python reproduce.py PICOTRON`, a checkout of huggingface/picotron. 2 ranks, gloo.
Exits with 1 when shards or layers of different ranks begin as copies; with 0 otherwise.
"""

import os
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, PORT = 2, "29553"
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


def run(rank, folder, picotron, wrong):
    start(rank, picotron, tp_size=RANKS)
    import picotron.process_group_manager as pgm
    from picotron import checkpoint
    from picotron.model import Llama
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
    from picotron.utils import set_all_seed
    from safetensors.torch import save_file

    def make(parallelize):
        """The calls of train.py, between the seed and the optimizer."""
        set_all_seed(42)
        with checkpoint.init_model_with_dematerialized_weights():
            model = parallelize(Llama(CONFIG))
        return checkpoint.init_model_with_materialized_weights(model, CONFIG, save_dir=folder)

    whole = Llama(CONFIG)
    names = checkpoint.InitializationManager(whole, CONFIG)
    files = {n: names.convert_safetensors_to_hf_name(n) for n in names.get_layer_names_in_sft_format()}
    if rank == 0:  # train.py loads a checkpoint, for its shapes, and then draws all weights anew
        stored = {n: whole.get_parameter(name).detach() for n, name in files.items()}
        save_file(stored, Path(folder) / "model.safetensors")
    dist.barrier()
    compare("tp 2", make(apply_tensor_parallel), rank, wrong)
    pgm.setup_process_group_manager(tp_size=1, cp_size=1, pp_size=RANKS, dp_size=1)
    compare("pp 2", make(lambda model: PipelineParallel(model, CONFIG)), rank, wrong)
    dist.destroy_process_group()


def compare(layout, model, rank, wrong):
    """Count matrices that are equal on both ranks. The names of stages differ, but not their order."""
    layers = model.decoder_layers
    matrices = [p.detach() for p in layers.parameters() if p.ndim > 1]
    both = [[torch.empty_like(m) for _ in range(RANKS)] for m in matrices]
    for copies, matrix in zip(both, matrices, strict=True):
        dist.all_gather(copies, matrix)
    equal = sum(torch.equal(*copies) for copies in both)
    wrong.value |= equal > 0
    if rank == 0:
        said = f"{equal} of {len(matrices)} matrices of the layers on a rank"
        print(f"{layout}: {said} are equal to the other rank's", flush=True)


if __name__ == "__main__":
    print("torch", torch.__version__)
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, str(Path(sys.argv[1]).resolve()), wrong), nprocs=RANKS)
    sys.exit(wrong.value)
