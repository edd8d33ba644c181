from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moeverify.cases.flops import count_training_flops
from moeverify.cases.schema import MoE, ReferenceModel
from moeverify.model.init import initialize
from moeverify.model.transformer import Transformer

ROWS, LENGTH = 2, 8
FIELDS = {
    "vocab_size": 40,
    "hidden": 16,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 24,
}
EXPERTS = MoE(num_experts=4, top_k=2, expert_hidden=8, shared_hidden=12, shared_gate=True)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("moe", [None, EXPERTS])
def test_the_count_is_what_torch_counts(moe, activation) -> None:
    spec = ReferenceModel(**FIELDS, moe=moe, num_dense_layers=1 if moe else 0, activation=activation)
    model = Transformer(spec)
    initialize(model, spec, 0)
    tokens = torch.randint(0, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    # The plain attention multiplies with every key, although the half above the diagonal is not needed.
    needless = spec.num_layers * 4 * spec.num_heads * spec.head_dim * (LENGTH - (LENGTH + 1) / 2)
    expected = 3 * (counter.get_total_flops() - needless * ROWS * LENGTH)
    assert count_training_flops(spec, LENGTH) * ROWS * LENGTH == expected
