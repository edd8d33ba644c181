"""Parameters that pytorch/examples' FSDP2 example leaves as memory held them.

Run as `python reproduce.py EXAMPLES`, a checkout of pytorch/examples.
Exits with 1 when there are such parameters; with 0 otherwise.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(sys.argv[1]) / "distributed" / "FSDP2"))
from model import ModelArgs, Transformer

print("torch", torch.__version__)
with torch.device("meta"):  # the sizes and the order of calls of distributed/FSDP2/example.py
    model = Transformer(ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64, dropout_p=0))
model.to_empty(device="cpu")
for parameter in model.parameters():
    parameter.data.fill_(7.0)  # stands for what memory held
model.reset_parameters()
left = [name for name, parameter in model.named_parameters() if (parameter == 7.0).all()]
total = len(list(model.parameters()))
print(
    f"{len(left)} of {total} parameters were not initialized: {left[0]} to {left[-1]}"
    if left
    else "none left"
)
sys.exit(bool(left))
