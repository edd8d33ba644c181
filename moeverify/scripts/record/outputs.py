"""Inputs and outputs of a model's modules, by row of the global batch.

The result for a row of the batch does not depend on the other rows in the forward pass. A tensor is
therefore stored as (rows, positions, ...) with the hashes of the model's input rows. It is compared with
another run's result for the same rows, whatever the distribution of rows over ranks and passes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from moeverify.parallel.regions.passes import is_in_backward
from moeverify.parallel.regions.placement import is_partial, local_part, region_of
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.unseen import unseen
from moeverify.scripts.record.lines import Output
from moeverify.scripts.record.rank_file import RankFile
from moeverify.scripts.record.tensors import describe_region
from moeverify.verification.compare.difference import fingerprint_bits

Sizes = tuple[int, int]  # rows and positions of the tokens of a forward pass


class ModuleOutputs:
    """A recorder of the first tensor that goes into each module and the first that comes out.

    It records only between `begin` and `end`. Exceptions are passed to `fail`, since none may reach the
    script.
    """

    def __init__(
        self, open_file: Callable[[], RankFile], limit: int, fail: Callable[[Exception], object]
    ) -> None:
        self._open = open_file
        self._limit = limit
        self._fail = fail
        self._handles: list[RemovableHandle] = []
        self._sizes: Sizes | None = None
        self._is_turned = False
        self._pid = os.getpid()
        self._step = self._forward = 0
        self._calls: dict[str, int] = {}
        self._kept: dict[tuple[int, tuple[int, ...], torch.dtype], int] = {}  # -> offset of equal values
        self._seen: dict[int, _WrittenTensor] = {}  # by id of the tensor

    def watch(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Hook modules, given as (name, module)."""
        for name, module in modules:
            enter, leave = self._make_hooks(name)
            # The input before a layout distributes it, and the output that the caller receives.
            self._handles.append(
                module.register_forward_pre_hook(unseen(enter), prepend=True, with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(unseen(leave)))

    def begin(self, step: int, forward: int, sizes: Sizes | None) -> None:
        """Begin a forward pass over tokens (rows, positions). If `sizes` is None, nothing is recorded."""
        self._step, self._forward, self._sizes, self._is_turned = step, forward, sizes, False
        self._calls.clear()
        self._kept.clear()
        self._seen.clear()

    def end(self) -> None:
        """Stop recording until the next `begin`, for an evaluation or at the end of the recording."""
        self._sizes = None

    def remove(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _make_hooks(self, name: str) -> tuple[Any, Any]:
        def enter(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._keeps():
                self._calls[name] = self._calls.get(name, 0) + 1
                self._keep(name, (*inputs, *named.values()), is_input=True)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._keeps():
                self._keep(name, output, is_input=False)

        return enter, leave

    def _keeps(self) -> bool:
        # Skip recomputations in backward passes, and hooks that a compiler would trace as part of the
        # model. Skip forked children, which share their parent's files.
        if torch.compiler.is_compiling() or self._sizes is None or os.getpid() != self._pid:
            return False
        return not is_in_backward()

    def _keep(self, name: str, value: Any, *, is_input: bool) -> None:
        try:
            with torch.no_grad():
                tensor = find_tensor(value)
                if tensor is None and is_input:
                    tensor = find_tensor(value, floating=False)
                self._write(name, tensor, is_input)
        except Exception as error:
            self._fail(error)

    def _write(self, name: str, tensor: Tensor | None, is_input: bool) -> None:
        if tensor is None or self._sizes is None or is_partial(tensor):
            return
        region = region_of(tensor) if isinstance(tensor, DTensor) else Region.whole(tensor.shape)
        self._is_turned = self._is_turned or is_turned_shape(region.shape, self._sizes)
        found = split_rows(local_part(tensor).detach(), region, self._sizes, is_turned=self._is_turned)
        if found is None:
            return
        local, region = found
        stride = choose_stride(local.numel() * local.element_size(), self._limit)
        if stride > 1:
            if len(region.dims[1]) != region.shape[1]:
                return
            local = local[:, ::stride]
        local = local.contiguous()
        file = self._open()
        bits, offset = self._keep_values(file, tensor, local)
        file.add(
            Output(
                step=self._step,
                forward=self._forward,
                name=name,
                call=self._calls.get(name, 1),
                is_input=is_input,
                where=describe_region(region),
                is_placed=isinstance(tensor, DTensor),
                stride=stride,
                dtype=str(local.dtype).removeprefix("torch."),
                offset=offset,
                bits=bits,
            )
        )

    def _keep_values(self, file: RankFile, tensor: Tensor, local: Tensor) -> tuple[int, int]:
        """Return hash and offset of the values of a tensor, which are written once.

        A tensor that one module returns and others get is not hashed again, which costs as much as writing.
        """
        shape = tuple(local.shape)
        # An inference tensor counts no changes.
        state = None if local.is_inference() else (local_part(tensor)._version, shape, self._is_turned)
        known = self._seen.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.state == state:
            return known.bits, known.offset
        bits = int(fingerprint_bits(local))
        key = (bits, shape, local.dtype)
        if key not in self._kept:
            self._kept[key] = file.keep(local)
        offset = self._kept[key]
        if state is not None:
            self._seen[id(tensor)] = _WrittenTensor(weakref.ref(tensor), state, bits, offset)
        return bits, offset


@dataclass(frozen=True)
class _WrittenTensor:
    """A tensor that was written, with the number of its changes, its shape and the order of its dims."""

    tensor: weakref.ref[Tensor]
    state: tuple[int, tuple[int, ...], bool]
    bits: int
    offset: int


def split_rows(
    local: Tensor, region: Region, sizes: Sizes, *, is_turned: bool = False
) -> tuple[Tensor, Region] | None:
    """Return a module's local tensor as (rows, positions, ...) with its region, or None.

    None means that the tensor does not have the batch's tokens in order, for example after a dispatch.
    `is_turned` is true for a model with positions before rows, such as Megatron. A flattened batch then
    begins with the first position of every row.
    Shapes: `region.shape` is (rows, positions, ...), (positions, rows, ...) or (rows * positions, ...).
    Under sequence parallelism a plain tensor has fewer positions.
    """
    num_rows, num_positions = sizes
    shape = region.shape
    if len(shape) < 2 or not local.numel():
        return None
    if len(shape) == 2 and tuple(shape) != sizes:
        if shape[0] != num_rows * num_positions or len(region.dims[0]) != shape[0]:
            return None
        first, second = (num_positions, num_rows) if is_turned else sizes
        split = Region.box((first, second, shape[1]), (range(first), range(second), region.dims[1]))
        local = local.reshape(split.local_shape)
        return (local.transpose(0, 1), _turn(split)) if is_turned else (local, split)
    if is_turned_shape(shape, sizes):
        local, region = local.transpose(0, 1), _turn(region)
    elif shape[0] != num_rows or num_positions % shape[1]:
        return None
    return (local, region) if len(region.dims[0]) == num_rows else None


def is_turned_shape(shape: Sequence[int], sizes: Sizes) -> bool:
    """Return whether a tensor is (positions, rows, ...)."""
    return len(shape) > 2 and tuple(shape[:2]) == (sizes[1], sizes[0]) and sizes[0] != sizes[1]


def _turn(region: Region) -> Region:
    order = (1, 0, *range(2, len(region.shape)))
    return Region.box([region.shape[dim] for dim in order], [region.dims[dim] for dim in order])


def choose_stride(size: int, limit: int) -> int:
    """Return the smallest stride of positions at which a tensor of `size` bytes fits into `limit` bytes.

    Strides are powers of two: 1 keeps every position, 2 every second one.
    """
    stride = 1
    while size > limit * stride:
        stride *= 2
    return stride


def find_tensor(value: Any, *, floating: bool = True) -> Tensor | None:
    """Return the first real or integer tensor of a value, which may be a tensor, a sequence or a mapping."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() is floating and not value.is_meta else None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next(
        (found for each in values if (found := find_tensor(each, floating=floating)) is not None), None
    )
