"""Stops at the first non-finite value: `Tra.on_nan(model)` checks module outputs and gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from multiprocessing_pdb.rank.compiled_code import is_disabled, may_stop
from multiprocessing_pdb.rank.monitor import arm
from multiprocessing_pdb.rank.pdb_loader import is_own_module
from multiprocessing_pdb.rank.session import Stop
from multiprocessing_pdb.rank.stop import stop_at
from multiprocessing_pdb.rank.tensors import count_bad, get_local, has_data

_MACHINERY = (
    "torch.nn.modules.",
    "torch._dynamo.",
    "torch.autograd",
    "torch._tensor",
    "torch.utils.hooks",
    __name__,
)


def _list_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in an output: alone, or in tuples, lists, dicts and dataclasses."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        yield value
        return
    children: Any = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, tuple | list):
        children = value
    elif hasattr(value, "__dataclass_fields__"):
        children = vars(value).values()
    for child in children:
        yield from _list_tensors(child)


def _is_bad(tensor: Any) -> bool:
    """Return whether an element is NaN or infinite. On an accelerator this waits for the stream."""
    local = get_local(tensor)
    if not has_data(local) or not (local.is_floating_point() or local.is_complex()):
        return False
    return not bool(local.isfinite().all())


def _explain(tensor: Any) -> str:
    nans, infinities = count_bad(tensor)
    counts = [f"{n} {word}" for n, word in ((nans, "nan"), (infinities, "inf")) if n]
    return f"{', '.join(counts)} of {get_local(tensor).numel()} elements"


class NanHooks:
    """The hooks of one model. `remove` removes them.

    The hooks do not change any computed value. A step begins with a call of the model. Each step stops at
    most once, because later non-finite values follow from the first.
    """

    def __init__(self, model: Any) -> None:
        self.step = 0
        self._is_quiet = False
        self._handles: list[Any] = []
        if is_disabled():
            return
        self._handles.append(model.register_forward_pre_hook(self._begin_step))
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._make_forward_hook(name or "the model")))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = self._make_parameter_hook(name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _begin_step(self, module: Any, inputs: Any) -> None:
        self.step += 1
        self._is_quiet = False

    def _make_forward_hook(self, name: str) -> Any:
        def look(module: Any, inputs: Any, output: Any) -> None:
            may_stop()  # hence the model runs uncompiled, and stops in its own frames
            for tensor in _list_tensors(output):
                if not self._is_quiet and _is_bad(tensor):
                    bad_inputs = any(map(_is_bad, _list_tensors(inputs)))
                    fed = "so are its inputs" if bad_inputs else "its inputs are finite"
                    what = f"output of {name} ({type(module).__name__}): {_explain(tensor)}; {fed}"
                    self._stop(what, {"bad_module": module, "bad_inputs": inputs, "bad_output": output})
                elif tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._make_gradient_hook(name))

        return look

    def _make_gradient_hook(self, name: str) -> Any:
        def look(gradient: Any) -> None:
            if not self._is_quiet and _is_bad(gradient):
                what = f"gradient of the output of {name}: {_explain(gradient)}"
                self._stop(what, {"bad_gradient": gradient})

        return look

    def _make_parameter_hook(self, name: str) -> Any:
        def look(parameter: Any) -> None:
            if not self._is_quiet and parameter.grad is not None and _is_bad(parameter.grad):
                what = f"gradient of parameter {name}: {_explain(parameter.grad)}"
                self._stop(what, {"bad_parameter": parameter})

        return look

    def _stop(self, what: str, names: dict[str, Any]) -> None:
        self._is_quiet = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_back is not None and _is_machinery(frame):
            frame = frame.f_back
        if frame is not None:
            stop_at(frame, Stop(f"step {self.step}, {what}", names=names), now=True)


def watch_model(model: Any) -> NanHooks:
    """Arm this process, so that it waits if another rank stops first, and return the hooks of a model."""
    arm()
    return NanHooks(model)


def _is_machinery(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return is_own_module(name) or name.startswith(_MACHINERY)
