"""Stops in functions that torch.compile compiles: they run uncompiled. Imports nothing of torch."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

_DYNAMO = "torch._C._dynamo.eval_frame"


def is_disabled() -> bool:
    """Return whether MPDB_DISABLE makes every stop a no-op."""
    return os.environ.get("MPDB_DISABLE", "") not in ("", "0")


def may_stop() -> bool:
    """Return whether stops are enabled. A function that calls this and may stop runs uncompiled.

    While it traces a function, torch.compile evaluates calls of functions that are marked as constants.
    """
    if is_disabled():
        return False
    dynamo: Any = sys.modules.get(_DYNAMO)
    if str(sys._getframe(1).f_globals.get("__name__")).startswith("torch."):
        raise sys.modules["torch._dynamo.exc"].SkipFrame("the debugger may stop here: it runs uncompiled")
    if hasattr(dynamo, "set_fullgraph_compiled_frame_count"):
        dynamo.set_fullgraph_compiled_frame_count(-1)  # fullgraph=True would refuse that
    return True


may_stop._dynamo_marked_constant = True  # type: ignore[attr-defined]


def end_compilation() -> None:
    """Run this thread uncompiled until the call of a compiled function ends in which it is.

    torch.compile would compile the functions of the debugger, and a step would stop in torch.compile.
    """
    dynamo: Any = sys.modules.get(_DYNAMO)
    if dynamo is not None:
        dynamo.set_eval_frame(None)


def leave_compiled_code(frame: FrameType) -> bool:
    """Run the compiled functions of a stack uncompiled from their next call; return whether `frame` is one.

    For breakpoint(), which breaks the graph: a compiled function has only the locals that are used later.
    """
    originals = getattr(sys.modules.get("torch._dynamo.convert_frame"), "orig_code_map", {})
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    is_compiled = frame.f_code in originals
    at: FrameType | None = frame
    while at is not None and skip is not None:
        if at.f_code in originals:
            skip(originals[at.f_code])
        at = at.f_back
    return is_compiled
