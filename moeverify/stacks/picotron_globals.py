"""Globals of picotron: the modules that it imports, the variables that it reads, and its process groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from moeverify.stacks.environment import kept_environment
from moeverify.stacks.framework import import_framework

# picotron.model imports these, although FLASH_ATTEN=0 selects plain torch.
_UNUSED = {
    "": "",
    ".flash_attn_interface": "flash_attn_func",
    ".layers": "",
    ".layers.rotary": "apply_rotary_emb",
    ".ops": "",
    ".ops.triton": "",
    ".ops.triton.layer_norm": "layer_norm_fn",
}


def import_picotron(path: str) -> None:
    """Import picotron, with empty modules for a flash_attn that is not installed. `path` is the field of a case.

    Raises: CaseError when it cannot be imported.
    """
    import_framework("picotron", least="", path=path)
    unused: dict[str, ModuleType] = {}
    if find_spec("flash_attn") is None:
        for name, function in _UNUSED.items():
            unused[f"flash_attn{name}"] = ModuleType(f"flash_attn{name}")
            setattr(unused[f"flash_attn{name}"], function, None)
    sys.modules.update(unused)
    try:
        import_framework("picotron.model", least="", path=path)
    finally:
        for name in unused:  # transformers looks for flash_attn too
            del sys.modules[name]


@contextmanager
def surround(groups: Any) -> Iterator[None]:
    """Set the global process groups and variables that picotron reads while it builds a model and in its passes."""
    import picotron.process_group_manager as pgm

    pgm.process_group_manager = groups
    is_ring = "1" if groups.cp_world_size > 1 else "0"
    with ExitStack() as stack:
        stack.enter_context(kept_environment(FLASH_ATTEN="0", CONTEXT_PARALLEL=is_ring))
        if not torch.cuda.is_available():
            # Its ring waits for CUDA on every device.
            stack.enter_context(patch.object(torch.cuda, "synchronize", lambda: None))
        yield
