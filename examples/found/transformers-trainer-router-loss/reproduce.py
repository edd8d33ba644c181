"""The router's balance loss in Trainer: one device, 4 accumulation steps, 2 data-parallel ranks.

Needs transformers and accelerate.

The global batch is one row, four times: any split of it routes alike, so every run must have the same
gradient. Exits with 1 when a router's gradient depends on the split, with 0 when it does not.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

ROUTER = "model.layers.0.mlp.gate.weight"


class Gradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        self.value = named[ROUTER].grad.double().clone()


def train(folder, rows, accumulate):
    model = Qwen3MoeForCausalLM.from_pretrained(folder, output_router_logits=True, router_aux_loss_coef=1.0)
    row = torch.randint(0, 96, (16,), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row}] * 4
    arguments = TrainingArguments(
        output_dir=folder + "/out",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulate,
        max_steps=1,
        max_grad_norm=0,
        optim="sgd",
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    gradient = Gradient()
    Trainer(model, arguments, train_dataset=data, callbacks=[gradient]).train()
    return gradient.value


def two_ranks(rank, folder, result):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29536")
    value = train(folder, 2, 1)
    if rank == 0:
        torch.save(value, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print("torch", torch.__version__, "transformers", transformers.__version__)
    set_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": 96,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe, **heads)).save_pretrained(folder)
        runs = {"1 rank": train(folder, 4, 1), "4 accumulation steps": train(folder, 1, 4)}
        mp.spawn(two_ranks, (folder, folder + "/result.pt"), nprocs=2)
        runs["2 ranks"] = torch.load(folder + "/result.pt")
    expected = runs["1 rank"]
    for name, actual in runs.items():
        print(
            f"{name}: norm of the router's gradient: expected {expected.norm():.5f} actual {actual.norm():.5f}"
        )
    sys.exit(int(any((g - expected).norm() > 1e-3 * expected.norm() for g in runs.values())))
