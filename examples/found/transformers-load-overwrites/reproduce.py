"""Weights that from_pretrained overwrites after it loaded them, on one device. Needs transformers.

Exits with 1 when a loaded tensor differs from the one that save_pretrained just wrote, with 0 when none does.
"""

import sys
import tempfile

import torch
import transformers
from transformers import YoutuConfig, YoutuForCausalLM, ZayaConfig, ZayaForCausalLM, set_seed

transformers.utils.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
set_seed(0)
sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "pad_token_id": 0}
youtu = YoutuForCausalLM(
    YoutuConfig(
        **sizes,
        **heads,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
)
zaya = ZayaForCausalLM(
    ZayaConfig(**sizes, **heads, num_key_value_heads=2, head_dim=8, num_experts=8, moe_intermediate_size=16)
)
wrong = False
for model in (youtu, zaya):
    # As after some training: no tensor has its initial value.
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensor.add_(torch.randn_like(tensor) * 0.05)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).state_dict()
    for name, expected in model.state_dict().items():
        if not torch.equal(loaded[name], expected):
            wrong = True
            at = tuple((loaded[name] != expected).nonzero()[0].tolist())
            values = f"expected {expected[at].item():.4f} actual {loaded[name][at].item():.4f}"
            print(f"{type(model).__name__} {name}{list(at)}: {values}")
sys.exit(int(wrong))
