"""Taps that read the inputs and outputs of a model's modules, and their gradients, in order of execution.

A tap reads every floating-point tensor that a module takes or returns, by position or name, during one
step. The tensor must run along the tokens of the batch: (rows, positions, ...), or (tokens, n) in
mixture-of-experts modules. On request it also reads other tensors (rows, n), such as token copies sorted by
expert. It does not read these inside the reference `MoELayer`, whose dispatchers are tapped instead.

Modules that are called more than once in a micro-batch have no readings: a pipeline stage may run only some
of the calls that one device runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.model.dispatcher import Dispatcher, ExpertFunction, Overlapping
from moeverify.model.moe import MoELayer
from moeverify.parallel.float8 import unpack
from moeverify.parallel.pipeline import ModelStage
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import Passes, is_in_backward
from moeverify.parallel.regions.placement import is_partial, local_part
from moeverify.parallel.regions.unseen import unseen

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Reading:
    """One tensor at the input or output of one module in one micro-batch.

    `order` counts the readings of its direction. `end` is `input` or `output`. `slot` identifies the
    tensor: `0` is the first, `1.0` the first of a tuple in second place, `weights` an argument of that
    name. `is_flat` is true where the module has (tokens, n). Shape of `local`: (rows, positions, ...) of
    this rank.
    """

    direction: str
    order: int
    module: str
    end: str
    micro_batch: int
    local: Tensor
    slot: str = "0"
    is_flat: bool = False


class Tap:
    """A reader of a model's modules during one training step; `readings` has the tensors.

    Attributes of the result:

    - `silent`: (module, end, slot, micro-batch) of forward readings that got no gradient.
    - `spans`: by direction and module, the values of `count` when each finished visit began and ended.

    If `on_reading` is set, the hook calls it with each reading instead of storing the reading.

    `num_rows` and `num_positions` are the size of a micro-batch on this rank. Gradients are divided by
    `scale`, the factor of the loss. `limit` bounds the number of stored elements. `count` returns the
    number of collectives that this rank has issued so far.
    """

    def __init__(
        self,
        model: nn.Module,
        num_rows: int,
        num_positions: int,
        *,
        scale: float,
        limit: int,
        count: Callable[[], int] = lambda: 0,
    ) -> None:
        self.spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._count = count
        self._begun: dict[tuple[str, str], int] = {}
        self._readings: list[Reading] = []
        self.on_reading: Callable[[Reading], None] | None = None
        self._is_open = False
        self._model = model
        self._tokens = (num_rows, num_positions)
        self._scale = scale
        self._room = limit
        self._passes = Passes()
        self._seen: set[tuple[str, str, str, int]] = set()
        self._callees: dict[tuple[str, int], object] = {}  # first callee of a name in a micro-batch
        self._repeated: set[tuple[str, int]] = set()
        self.silent: set[tuple[str, str, str, int]] = set()
        self._shapes: dict[str, torch.Size] = {}  # (rows, positions) of each module's last input
        self._orders = {FORWARD: 0, BACKWARD: 0}

    @property
    def readings(self) -> list[Reading]:
        """Return the readings of modules that were called once in their micro-batch."""
        return [each for each in self._readings if (each.module, each.micro_batch) not in self._repeated]

    @property
    def num_passes(self) -> int:
        """Return the number of micro-batches in which the model, or each of its stages, ran forward."""
        return min(self._passes.num_begun.values(), default=0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read while the context is open."""
        handles: list[RemovableHandle] = []
        dispatchers: dict[MoELayer, Dispatcher] = {}
        root: nn.Module = self._model
        for name, module in self._model.named_modules():
            if isinstance(module, ModelStage):
                root = module
            pre_hook = self._make_pre_hook(logical_name(name), root)
            handles.append(module.register_forward_pre_hook(unseen(pre_hook), with_kwargs=True))
            handles.append(module.register_forward_hook(unseen(self._make_hook(logical_name(name), root))))
            if isinstance(module, MoELayer):
                dispatchers[module] = module.dispatcher
                module.dispatcher = tap_dispatcher(
                    module.dispatcher, self._make_edge(logical_name(name), root)
                )
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            for handle in handles:
                handle.remove()
            for block, dispatcher in dispatchers.items():
                block.dispatcher = dispatcher

    def _make_edge(self, block: str, root: nn.Module) -> Callable[[str, Tensor], Tensor]:
        """Return a function that reads an end of a block's dispatcher and returns the tensor."""

        def read(end: str, value: Tensor) -> Tensor:
            shape = self._shapes.get(block)
            if shape is None or shape.numel() != len(value):
                return value
            name = f"{block}.dispatcher"
            if end == "input":
                self._begin(FORWARD, name)
                self._note_call(name, root, self._passes.number(root))
            # The view is a graph node of its own, so its gradient comes only through the experts.
            passed = value.view(*shape, -1)
            self._take(name, end, passed, self._passes.number(root))
            if end == "output":
                self._end(FORWARD, name)
            return passed.flatten(0, 1)

        return read

    def _make_pre_hook(self, name: str, root: nn.Module) -> Any:
        def hook(module: nn.Module, inputs: Any, named: Any) -> None:
            if module is root:
                self._passes.begin(root)
            self._begin(FORWARD, name)
            self._note_call(name, module, self._passes.number(root))
            self._take(name, "input", dict(enumerate(inputs)) | named, self._passes.number(root))

        return hook

    def _make_hook(self, name: str, root: nn.Module) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            self._take(name, "output", output, self._passes.number(root))
            self._end(FORWARD, name)

        return hook

    def _note_call(self, name: str, callee: object, micro_batch: int | None) -> None:
        """Note a second call of a module. A wrapper has the name of its module; recomputation is no call."""
        if micro_batch is None or is_in_backward():
            return
        key = (name, micro_batch)
        if key not in self._callees:
            self._callees[key] = callee
        elif self._callees[key] is callee:
            self._repeated.add(key)

    def _take(self, name: str, end: str, value: Any, micro_batch: int | None) -> None:
        if micro_batch is None:
            return
        for number, (slot, tensor) in enumerate(list_floats(value)):
            is_first = number == 0
            if is_first and end == "input" and tensor.ndim > 2:
                self._shapes[name] = tensor.shape[:2]
            key = (name, end, slot, micro_batch)
            if key in self._seen:
                continue  # a second visit is a recomputation
            if not self._is_read(tensor):
                continue
            self._seen.add(key)
            self._keep(FORWARD, key, unpack(tensor))
            if tensor.requires_grad:
                self.silent.add(key)
                hook_gradient(tensor, self._make_gradient_hook(key, is_first=is_first))

    def _make_gradient_hook(
        self, key: tuple[str, str, str, int], *, is_first: bool
    ) -> Callable[[Tensor], None]:
        name, end, _, _ = key

        def on_gradient(gradient: Tensor) -> None:
            self.silent.discard(key)
            if is_first:
                (self._begin if end == "output" else self._end)(BACKWARD, name)
            self._keep(BACKWARD, key, unpack(gradient) / self._scale)

        return on_gradient

    def _is_flat(self, tensor: Tensor) -> bool:
        """Return whether a tensor is (tokens, n), with all tokens of a micro-batch in order."""
        return tensor.ndim == 2 and tensor.shape[0] == math.prod(self._tokens)

    def _is_read(self, tensor: Tensor) -> bool:
        return tensor.ndim > 2 or self._is_flat(tensor)

    def _begin(self, direction: str, name: str) -> None:
        self._begun[direction, name] = self._count()

    def _end(self, direction: str, name: str) -> None:
        begun = self._begun.pop((direction, name), None)
        if begun is not None:
            self.spans.setdefault((direction, name), []).append((begun, self._count()))

    def _keep(self, direction: str, key: tuple[str, str, str, int], tensor: Tensor) -> None:
        if is_partial(tensor):
            return  # a partial sum; the reduced tensor is read at the next end
        local = local_part(tensor.detach())
        is_flat = self._is_flat(local)
        if local.numel() > self._room or not self._is_read(local):
            return
        order = self._orders[direction]
        self._orders[direction] += 1
        name, end, slot, micro_batch = key
        shaped = local.view(*self._tokens, -1) if is_flat else local
        reading = Reading(direction, order, name, end, micro_batch, shaped, slot, is_flat)
        if self.on_reading is not None:
            self.on_reading(reading)
            return
        self._room -= local.numel()
        # Copied on CPUs too: later operations may write into the tensor.
        self._readings.append(replace(reading, local=shaped.to("cpu", copy=True)))


class _TappedDispatcher:
    """Dispatcher whose input and output tokens are read."""

    def __init__(self, inner: Dispatcher, read: Callable[[str, Tensor], Tensor]) -> None:
        self.inner = inner
        self.read = read

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the inner dispatcher's output, with the same shapes."""
        return self.read("output", self.inner(self.read("input", x), ids, weights, experts))


class _TappedOverlapping(_TappedDispatcher, Overlapping):
    """Tapped dispatcher that runs other computation while tokens travel."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return the inner dispatcher's output, and pass on the computation to overlap."""
        assert isinstance(self.inner, Overlapping)
        self.inner.meanwhile, self.meanwhile = self.meanwhile, None
        return super().__call__(x, ids, weights, experts)


def tap_dispatcher(inner: Dispatcher, read: Callable[[str, Tensor], Tensor]) -> Dispatcher:
    """Return a dispatcher whose input (N, H) and output are replaced by `read(end, tensor)`."""
    return (_TappedOverlapping if isinstance(inner, Overlapping) else _TappedDispatcher)(inner, read)


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call a hook with the gradient of a tensor, if it has one.

    Torch also calls hooks with None, if a custom `backward` returns no gradient for the tensor.
    """
    handle = tensor.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: None if gradient is None else hook(gradient)
    )
    return cast("RemovableHandle", handle)


def list_floats(value: Any, slot: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (slot, tensor) of the floating-point tensors in a module's inputs or outputs; see `Reading`."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield slot or "0", value
    elif isinstance(value, tuple | list | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from list_floats(item, f"{slot}.{key}" if slot else str(key))
