"""Dtypes of module outputs, and casts that narrow a residual stream, in one pass of a model.

A residual stream is a path from an input of a module to its output that only adds to the input. Autograd
records the path: additions, copies and views. A cast on it rounds the whole stream, not just one branch, and
bounds in a narrow precision cannot show it. A module that ends in another operation, such as a norm, has no
such path and no stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import is_in_backward
from moeverify.results.facts import DtypeUse
from moeverify.train.module_taps import list_floats
from moeverify.verification.checks import operator_dtypes
from moeverify.verification.checks.narrower import is_narrower, name_dtype
from moeverify.verification.checks.operator_dtypes import OperatorDtypes
from moeverify.verification.collectives.trace import find_call

Note = Callable[[DtypeUse, str, torch.dtype, str, Node | None], None]
"""Takes use, module, dtype, slot or wide dtype, and the operation that made the tensor."""

_ADDITION = "AddBackward0"
_CAST = "ToCopyBackward0"
_SCALINGS = ("MulBackward0", "DivBackward0")  # by a constant, if they have one operand with a graph
_COPIES = (_CAST, "AliasBackward0", "CloneBackward0", "UnsafeViewBackward0", "ViewBackward0")
_MOST_NODES = 64  # of a path; a residual of a block has a handful


class ModuleDtypes:
    """Hooks that pass the dtype of each float output of each module to `note`, and each narrowed stream.

    `note_operator` gets the dtypes of operators (`operator_dtypes`).
    """

    def __init__(
        self, model: nn.Module, note: Note, note_operator: operator_dtypes.Note | None = None
    ) -> None:
        self._note = note
        self._entered: dict[nn.Module, list[list[Node]]] = {}
        self._handles: list[RemovableHandle] = []
        # torch compiles functions again under another mode, up to its limit.
        sees = note_operator is not None and not any(map(_is_compiled, model.modules()))
        self._operators = OperatorDtypes(note_operator) if note_operator is not None and sees else None
        self._names = {module: logical_name(prefix) for prefix, module in model.named_modules()}
        for prefix, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            hook = self._make_hook(logical_name(prefix))
            # Without `always_call`: with it torch compiles each module anew, up to its limit.
            self._handles.append(module.register_forward_hook(hook))

    def enter_step(self) -> None:
        """Note the operators of a user's step as well, until `leave_step`."""
        if self._operators is not None:
            self._operators.enter(None)

    def leave_step(self) -> None:
        """Leave the step, and any module in which it raised."""
        if self._operators is not None:
            self._operators.close()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._entered.clear()
        self.leave_step()

    def _enter(self, module: nn.Module, inputs: Any, named: Any) -> None:
        if _is_watched():
            tensors = [tensor for _, tensor in list_floats(dict(enumerate(inputs)) | named)]
            nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
            self._entered.setdefault(module, []).append(nodes)
            if self._operators is not None:
                self._operators.enter(self._names[module])

    def _make_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not _is_watched():
                return
            if self._operators is not None:
                self._operators.leave()
            visits = self._entered.get(module)
            entered = visits.pop() if visits else []
            for slot, tensor in list_floats(output):
                self._note(DtypeUse.OUTPUT, name, tensor.dtype, slot, tensor.grad_fn)
                cast = find_narrowing(tensor, entered)
                if cast is not None:
                    wide = _dtype_of(*cast.next_functions[0])
                    assert wide is not None
                    self._note(DtypeUse.RESIDUAL, name, tensor.dtype, name_dtype(wide), cast)

        return hook


def _is_compiled(module: nn.Module) -> bool:
    # The wrapper of `torch.compile` has the module in this attribute. Importing its class takes a second.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _is_watched() -> bool:
    """Return whether this is a pass that trains, and no compiled or recomputed one."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_in_backward()


def find_narrowing(output: Tensor, entered: Collection[Node]) -> Node | None:
    """Return the cast that narrows a residual stream between an input of a module and its output, or None.

    `entered` are the operations that made the inputs. The input must be wider than the output.
    """
    ends = set(entered)
    if output.grad_fn is None or not ends:
        return None
    # (operation, the narrowing cast passed so far, whether an addition was passed)
    open_ones: list[tuple[Node, Node | None, bool]] = [(output.grad_fn, None, False)]
    for _ in range(_MOST_NODES):
        if not open_ones:
            return None
        node, cast, is_added = open_ones.pop()
        if node in ends:
            if cast is not None and is_added:
                return cast
            continue
        before = [(each, number) for each, number in node.next_functions if each is not None]
        name = node.name()
        is_scaling = name in _SCALINGS and len(before) == 1
        if name != _ADDITION and name not in _COPIES and not is_scaling:
            continue
        if name == _CAST and before and _narrows(node, *before[0]):
            cast = node
        open_ones += [(each, cast, is_added or name == _ADDITION) for each, _ in before]
    return None


def _narrows(cast: Node, before: Node, number: int) -> bool:
    made, taken = _dtype_of(cast, 0), _dtype_of(before, number)
    return made is not None and taken is not None and is_narrower(made, taken)


def _dtype_of(node: Node | None, number: int) -> torch.dtype | None:
    """Return the dtype of a result of an operation."""
    known = getattr(node, "_input_metadata", ())
    dtype: torch.dtype | None = known[number].dtype if number < len(known) else None
    return dtype


_ENTRY = re.compile(r'  File "(.+)", line (\d+), in (.+)')
_PACKAGE = Path(__file__).parents[2]
_SKIPPED = (
    str(Path(torch.__file__).parent),
    *(str(_PACKAGE / name) for name in ("parallel/regions", "train", "verification")),
    "<",
)


def find_caller() -> tuple[str, str]:
    """Return the function of the user's code that is running, and its line as `file:line in function`."""
    frame = find_call(_SKIPPED)
    if frame is None:
        return "", ""
    code = frame.f_code
    return code.co_qualname, f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def find_line(node: Node | None) -> str:
    """Return the line that called an operation, as `file:line in function`.

    Empty unless the operation ran under `torch.autograd.set_detect_anomaly`.
    """
    metadata: Any = {} if node is None else node.metadata
    entries = metadata.get("traceback_", [])
    for entry in reversed(entries):
        found = _ENTRY.match(entry)
        if found is not None and not found[1].startswith(_SKIPPED):
            return f"{Path(found[1]).name}:{found[2]} in {found[3]}"
    return ""
