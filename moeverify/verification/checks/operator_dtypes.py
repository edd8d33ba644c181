"""Dtypes in which the operators of each module, and of a user's own step, compute in one step.

A softmax in 16 bits, where one device widens its input, adds less error than the bound of its module allows, and
a run in float32 does not show it. The dtype shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moeverify.parallel.regions.passes import is_in_backward
from moeverify.train.pass_mode import PassMode

# Functions that compute no number: each element of their result is an element of an input, or a constant.
_MOVING = frozenset(
    {"bfloat16", "copy", "double", "float", "get", "half", "set", "to", "type", "type_as"}
    | {"broadcast_to", "cat", "chunk", "clone", "concat", "concatenate", "contiguous", "detach", "embedding"}
    | {"expand", "expand_as", "flatten", "flip", "gather", "getitem", "hstack", "index", "index_copy"}
    | {"index_put", "index_select", "masked_fill", "masked_select", "movedim", "narrow", "pad", "permute"}
    | {"repeat", "repeat_interleave", "requires_grad", "reshape", "roll", "scatter", "select", "setitem"}
    | {"split", "split_with_sizes", "squeeze", "stack", "swapaxes", "t", "take_along_dim", "tensor_split"}
    | {"tile", "transpose", "tril", "triu", "unbind", "unflatten", "unsqueeze", "view", "view_as", "vstack"}
    | {"where"}
)

Note = Callable[[str | None, str, torch.dtype], None]
"""Takes the FQN of the innermost module, or None outside of all, the name of an operator and its dtype."""


class OperatorDtypes(PassMode):
    """A mode that passes operators to `note`: in modules those whose result needs a gradient.

    It is active from the entry of an outermost module, or of a user's step, until that returns. torch compiles
    functions again under another mode, so one object serves all passes.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note
        self._inside: list[str | None] = []

    def enter(self, name: str | None) -> None:
        """Enter a module, or a user's step with None."""
        self._inside.append(name)
        if len(self._inside) == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Leave the innermost module or step."""
        if self._inside:
            self._inside.pop()
            if not self._inside:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Leave all modules: a forward pass may have raised."""
        while self._inside:
            self.leave()

    def finish(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Note the dtype of a result; see `PassMode`."""
        if torch.compiler.is_compiling() or not self._inside:  # first: the compiler traces this function
            return result
        name = _name(func)
        tensors = tree_leaves(args if result is None else result)
        made = next((each for each in tensors if isinstance(each, Tensor)), None)
        if made is not None and made.is_floating_point() and name not in _MOVING and self._counts(made):
            self._note(self._inside[-1], name, made.dtype)
        return result

    def _counts(self, made: Tensor) -> bool:
        if is_in_backward():
            return False
        return self._inside[-1] is None or (made.requires_grad and made.grad_fn is not None)


def _name(func: Any) -> str:
    """Return the name of an operator, alike for its function, method, reflected and in-place forms."""
    name = str(getattr(func, "__name__", "")).strip("_")
    reflected = getattr(func, "__name__", "").startswith(("__r", "__i"))
    return name[1:] if reflected and hasattr(torch.Tensor, f"__{name[1:]}__") else name
