"""FSDP2's mixed-precision policy, and the experts that FSDP2 does not wrap."""

from __future__ import annotations

import torch

from moeverify.cases.schema import MoE
from moeverify.model.moe import MoELayer
from moeverify.parallel.fsdp2 import AS_STORED, _leave_alone, choose_policy

SPEC = MoE(num_experts=2, top_k=1, expert_hidden=4)


def make_block() -> MoELayer:
    factory = {"dtype": torch.float32, "device": torch.device("cpu")}
    return MoELayer(8, SPEC, mlp_bias=False, backend="loop", factory=factory)


def test_policy_computes_narrow_and_reduces_as_stored() -> None:
    block = make_block()
    policy = choose_policy(block, torch.bfloat16)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert choose_policy(block, torch.float32) is choose_policy(block, None) is AS_STORED


def test_experts_left_alone_compute_narrow_and_get_wide_gradients() -> None:
    block = make_block()
    alone = _leave_alone(block, choose_policy(block, torch.bfloat16))
    assert alone == set(block.experts.parameters())
    weights = block.experts.collect_weights()
    assert weights.gate.dtype == torch.bfloat16
    weights.gate.sum().backward()
    assert block.experts.gate.grad is not None
    assert block.experts.gate.grad.dtype == torch.float32


def test_without_mixed_precision_they_compute_with_what_is_stored() -> None:
    block = make_block()
    _leave_alone(block, AS_STORED)
    assert block.experts.collect_weights().gate is block.experts.gate
