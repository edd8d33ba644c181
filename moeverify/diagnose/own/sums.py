"""Known tensors of a module that may be in its output once more, or should not be: a residual, a bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moeverify.diagnose.own.trace import Trace

_MOST = 200


def list_known(trace: Trace, inputs: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the output's shape, or that broadcast to it, by name: inputs, and what modules return."""
    shape, count = trace.output.shape, 0
    seen: set[int] = set()
    named = [
        ("1", torch.ones_like(trace.output)),
        *inputs,
        *((name, child.made) for name, child in trace.children.items() if name and child.made is not None),
    ]
    for name, tensor in named:
        values = tensor.detach().to("cpu", torch.float64)
        if values.numel() == trace.output.numel() and values.shape != shape:
            values = values.reshape(shape)
        if values.shape != shape or not bool(values.any()) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        count += 1
        if count > _MOST:
            return
        yield name, values
