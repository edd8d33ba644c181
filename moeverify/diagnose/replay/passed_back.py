"""What comes back into a block by each of its branches, whose sum is the gradient of its input.

A tensor that several modules take has one gradient; what one of them alone adds to it is computed again here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from moeverify.diagnose.replay.tokenwise import pull_back
from moeverify.model.moe import MoE
from moeverify.model.transformer import Block
from moeverify.train.module_taps import BACKWARD, FORWARD


class Read(Protocol):
    """Gives what one device read at an end of a module; see `RightModules.read`."""

    def __call__(self, module: str, end: str, direction: str = FORWARD) -> Tensor | None:
        """Return it, None where it was not read."""


def list_block_gradients(block: Block, name: str, read: Read, *, is_middle: bool) -> dict[str, Tensor | None]:
    """Return what comes back to a block's input by its residual and by attention.

    `is_middle` asks for what lies between the two halves of the block: there the second half passes back.
    """
    inner = "ffn_norm" if is_middle else "attention_norm"
    after = read(name, "output", BACKWARD) if is_middle else read(f"{name}.ffn_norm", "input", BACKWARD)
    branch = "feed-forward block" if is_middle else "attention"
    norm = block.ffn_norm if is_middle else block.attention_norm
    return {"residual": after, branch: _pass_back(norm, f"{name}.{inner}", read)}


def list_moe_gradients(block: MoE, name: str, read: Read) -> dict[str, Tensor | None]:
    """Return what comes back to the input of a block of experts: by its router what no other branch passes back."""
    whole = read(name, "input", BACKWARD)
    found = {"routed experts": read(f"{name}.dispatcher", "input", BACKWARD)}
    if block.shared is not None:
        found["shared expert"] = _pass_back(block.shared, f"{name}.shared", read)
    if block.shared_gate is not None:
        found["shared gate"] = _pass_back(block.shared_gate, f"{name}.shared_gate", read)
    rest = whole
    for part in found.values():
        rest = None if rest is None or part is None else rest - part
    return {**found, "router": rest}


def _pass_back(module: nn.Module, name: str, read: Read) -> Tensor | None:
    """Return the gradient of a module's input that comes through it alone."""
    x, gradient = read(name, "input"), read(name, "output", BACKWARD)
    if x is None or gradient is None:
        return None
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        return pull_back(module(leaf), leaf, gradient)
