"""Train the tiny Mixtral of this folder with transformers alone: sequences that count up by 1, 2 or 3.

python examples/weights/train.py examples/weights/tiny-mixtral
"""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM

VOCAB, ROWS, POSITIONS = 64, 16, 24

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
)
model = MixtralForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(400):
    start = torch.randint(VOCAB, (ROWS, 1))
    tokens = (start + torch.randint(1, 4, (ROWS, 1)) * torch.arange(POSITIONS)) % VOCAB
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.to(torch.bfloat16).save_pretrained(sys.argv[1])
sys.stdout.write(f"loss {loss.item():.3f}\n")
