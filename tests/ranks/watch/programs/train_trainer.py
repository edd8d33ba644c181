"""Trains a small Qwen3-MoE by transformers' Trainer. It knows nothing of moeverify, nor of how it is launched.

python train_trainer.py --rows 2 --accumulate 4
accelerate launch --config_file fsdp2.yaml train_trainer.py --rows 2 --accumulate 2

Both see the same rows in a step if rows x accumulate x ranks is the same. `--bug` plants one.
"""

from __future__ import annotations

import argparse

import torch
from small_qwen import LENGTH, VOCABULARY, make_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

NUM_ROWS = 64


class Rows(Dataset):
    """Random tokens; each row is determined by its number."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens.clone()}


class LocalMean(Trainer):
    """The bug `local-mean`: the loss is divided by the tokens of this micro-batch, not of the step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, None)


class OldGradients(Trainer):
    """The bug `old-gradients`: those of the last micro-batch are added twice."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return loss


BUGS = {"none": Trainer, "local-mean": LocalMean, "old-gradients": OldGradients}


def main() -> None:
    """Train two steps."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rows", type=int, default=2, help="in a micro-batch of a rank")
    arguments.add_argument("--accumulate", type=int, default=2, help="micro-batches")
    arguments.add_argument("--bf16", action="store_true")
    arguments.add_argument("--cpu", action="store_true")
    arguments.add_argument("--bug", choices=BUGS, default="none")
    options = arguments.parse_args()
    trainer = BUGS[options.bug](
        model=make_model(),
        args=TrainingArguments(
            output_dir="trained",
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=options.accumulate,
            max_steps=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            bf16=options.bf16,
            use_cpu=options.cpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Rows(),
    )
    trainer.train()


if __name__ == "__main__":
    main()
