"""Taps a model's modules: what goes into each, what comes out, and the gradients of both, in order.

Only tensors that run along the tokens of the batch, (rows, positions, ...), are kept, for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.layout.local_shard import logical_name
from moeverify.layout.placement import is_partial, local_part
from moeverify.model.dispatcher import Dispatcher, ExpertFunction, Overlapping
from moeverify.model.moe import MoE
from moeverify.parallel.pipeline import Stage

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Reading:
    """One tensor at one end of one module in one micro-batch.

    `order` counts the readings of its direction; `end` is `input` or `output`. Shape: (rows, positions, ...)
    of this rank.
    """

    direction: str
    order: int
    module: str
    end: str
    micro_batch: int
    local: Tensor


class Tap:
    """Reads the modules of a model while it trains one step; `readings` has what it saw.

    `scale` is what the loss was multiplied by, and is divided out of gradients again. `limit` bounds the
    elements that are kept. `count` says how many collectives this rank has issued so far; `spans` has what it
    said when each module began and ended, by direction and module, for every visit that has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        num_positions: int,
        *,
        scale: float,
        limit: int,
        count: Callable[[], int] = lambda: 0,
    ) -> None:
        self.spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._count = count
        self._begun: dict[tuple[str, str], int] = {}
        self.readings: list[Reading] = []
        self._model = model
        self._num_positions = num_positions
        self._scale = scale
        self._room = limit
        self._micro_batches: dict[nn.Module, int] = {}
        self._seen: set[tuple[str, str, int]] = set()
        self._shapes: dict[str, torch.Size] = {}  # rows and positions of what went into a module last
        self._orders = {FORWARD: 0, BACKWARD: 0}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read while the block runs."""
        handles: list[RemovableHandle] = []
        dispatchers: dict[MoE, Dispatcher] = {}
        root: nn.Module = self._model
        for name, module in self._model.named_modules():
            if isinstance(module, Stage):
                root = module
            pre_hook = self._make_pre_hook(logical_name(name), root)
            handles.append(module.register_forward_pre_hook(pre_hook))
            handles.append(module.register_forward_hook(self._make_hook(logical_name(name), root)))
            if isinstance(module, MoE):
                dispatchers[module] = module.dispatcher
                module.dispatcher = tap_dispatcher(
                    module.dispatcher, self._make_edge(logical_name(name), root)
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for block, dispatcher in dispatchers.items():
                block.dispatcher = dispatcher

    def _make_edge(self, block: str, root: nn.Module) -> Callable[[str, Tensor], Tensor]:
        """Return what reads an end of the dispatcher of a block, and hands on what goes through it."""

        def read(end: str, value: Tensor) -> Tensor:
            shape = self._shapes.get(block)
            if shape is None or shape.numel() != len(value):
                return value
            # A node of the graph of its own: its gradient is what comes through the experts, and by no other way.
            passed = value.view(*shape, -1)
            self._take(f"{block}.dispatcher", end, passed, self._micro_batches.get(root, 0))
            return passed.flatten(0, 1)

        return read

    def _make_pre_hook(self, name: str, root: nn.Module) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if module is root:
                self._micro_batches[root] = self._micro_batches.get(root, -1) + 1
            self._begin(FORWARD, name)
            self._take(name, "input", inputs, self._micro_batches.get(root, 0))

        return hook

    def _make_hook(self, name: str, root: nn.Module) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            self._take(name, "output", output, self._micro_batches.get(root, 0))
            self._end(FORWARD, name)

        return hook

    def _take(self, name: str, end: str, value: Any, micro_batch: int) -> None:
        key = (name, end, micro_batch)
        tensor = _first_float(value)
        if tensor is not None and end == "input" and tensor.ndim > 2:
            self._shapes[name] = tensor.shape[:2]
        if tensor is None or key in self._seen or tensor.ndim < 3:
            return  # a second visit is a recomputation
        self._seen.add(key)
        self._keep(FORWARD, name, end, micro_batch, tensor)
        if tensor.requires_grad:

            def on_gradient(gradient: Tensor) -> None:
                (self._begin if end == "output" else self._end)(BACKWARD, name)
                self._keep(BACKWARD, name, end, micro_batch, gradient / self._scale)

            tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _begin(self, direction: str, name: str) -> None:
        self._begun[direction, name] = self._count()

    def _end(self, direction: str, name: str) -> None:
        begun = self._begun.pop((direction, name), None)
        if begun is not None:
            self.spans.setdefault((direction, name), []).append((begun, self._count()))

    def _keep(self, direction: str, name: str, end: str, micro_batch: int, tensor: Tensor) -> None:
        if is_partial(tensor):
            return  # a partial sum: what it will be reduced to is read at the next end
        local = local_part(tensor.detach())
        if local.numel() > self._room:
            return
        self._room -= local.numel()
        order = self._orders[direction]
        self._orders[direction] += 1
        copy = local.to("cpu", copy=True)
        self.readings.append(Reading(direction, order, name, end, micro_batch, copy))


class _TappedDispatcher:
    """A dispatcher whose tokens are read on their way in and out."""

    def __init__(self, inner: Dispatcher, read: Callable[[str, Tensor], Tensor]) -> None:
        self.inner = inner
        self.read = read

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return what the inner dispatcher does; shapes as there."""
        return self.read("output", self.inner(self.read("input", x), ids, weights, experts))


class _TappedOverlapping(_TappedDispatcher, Overlapping):
    """One that computes something else while tokens travel."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertFunction) -> Tensor:
        """Return what the inner dispatcher does, with what it is to compute meanwhile."""
        assert isinstance(self.inner, Overlapping)
        self.inner.meanwhile, self.meanwhile = self.meanwhile, None
        return super().__call__(x, ids, weights, experts)


def tap_dispatcher(inner: Dispatcher, read: Callable[[str, Tensor], Tensor]) -> Dispatcher:
    """Return a dispatcher that shows its input (N, H) and output to `read`, and goes on with what that returns."""
    return (_TappedOverlapping if isinstance(inner, Overlapping) else _TappedDispatcher)(inner, read)


def _first_float(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, tuple | list):
        return next((found for item in value if (found := _first_float(item)) is not None), None)
    return None
