"""Policies of mixed precision have no effect in a wider run."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from moeverify.parallel.policies import without_policies

NARROW = torch.bfloat16


def test_policies_ask_for_no_dtype_inside_and_are_as_before_afterwards() -> None:
    before = MixedPrecisionPolicy(param_dtype=NARROW, output_dtype=NARROW)
    with without_policies():
        inside = MixedPrecisionPolicy(param_dtype=NARROW, cast_forward_inputs=False)
        flat = MixedPrecision(param_dtype=NARROW, reduce_dtype=NARROW)
        assert (before.param_dtype, before.output_dtype, inside.param_dtype) == (None, None, None)
        assert (flat.param_dtype, flat.reduce_dtype) == (None, None)
        assert not inside.cast_forward_inputs
    assert (before.param_dtype, before.output_dtype, inside.param_dtype) == (NARROW, NARROW, NARROW)
    assert flat.reduce_dtype == NARROW
    assert MixedPrecisionPolicy() == MixedPrecisionPolicy(None, None, None)
