"""Hooks on the outputs of a model's blocks, with the region of the global batch that each output covers.

A block is a child of an outermost `ModuleList` or `ModuleDict`, such as `layers.3`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.cases.schema import Data
from moeverify.parallel import pipeline
from moeverify.parallel.regions.local_shard import logical_name
from moeverify.parallel.regions.passes import Passes
from moeverify.parallel.regions.placement import local_part
from moeverify.parallel.regions.region import Region
from moeverify.parallel.regions.unseen import unseen
from moeverify.train.data import Share
from moeverify.train.program import TrainingProgram

EMBEDDING = "embed"
"""Name under which the input of the first block is passed to `take`."""

Take = Callable[[str, Tensor, Region], Tensor]


class BlockEnds:
    """Hooks that pass each block's output (B, S, H) to `take` and replace it by the returned tensor.

    `take` gets the block's name, the output and its region. The input of the block called `first` is passed
    as `EMBEDDING`. Each tensor is passed once per step and micro-batch: a second visit is a recomputation
    and keeps its own tensor. Passes that belong to no micro-batch are left alone. `tp` is this rank's
    coordinate on the tp axis: sequence parallelism shards positions over it.
    """

    def __init__(self, program: TrainingProgram, data: Data, tp: int, take: Take, *, first: str = "") -> None:
        self._data = data
        self._tp = tp
        self._take = take
        self._passes = Passes()
        self._seen: set[tuple[str, int]] = set()
        self._handles: list[RemovableHandle] = []
        self._shares: Sequence[Share] = program.share.micro_batches(program.num_micro_batches)
        for root in _list_roots(program.model):
            self._handles.append(root.register_forward_pre_hook(self._count))
        for name, root, block in _list_blocks(program.model):
            self._handles.append(block.register_forward_hook(unseen(self._make_hook(name, root))))
            if name == first:  # may be on another rank than the embedding
                self._handles.append(block.register_forward_pre_hook(unseen(self._make_pre_hook(root))))

    def begin_step(self) -> None:
        """Restart the count of micro-batches at zero."""
        self._passes = Passes()
        self._seen.clear()

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _count(self, root: nn.Module, inputs: Any) -> None:
        self._passes.begin(root)

    def _make_hook(self, name: str, root: nn.Module) -> Any:
        def hook(block: nn.Module, inputs: Any, output: Any) -> Any:
            is_tuple = isinstance(output, tuple)
            value = output[0] if is_tuple else output
            passed = self._pass(name, root, value)
            if passed is value:
                return None  # leave the output as it is, whatever its type
            return (passed, *output[1:]) if is_tuple else passed

        return hook

    def _make_pre_hook(self, root: nn.Module) -> Any:
        def hook(block: nn.Module, inputs: Any) -> Any:
            return (self._pass(EMBEDDING, root, inputs[0]), *inputs[1:])

        return hook

    def _pass(self, name: str, root: nn.Module, value: Any) -> Any:
        number = self._passes.number(root)
        if number is None or number >= len(self._shares) or not isinstance(value, Tensor):
            return value
        if (name, number) in self._seen:
            return value
        self._seen.add((name, number))
        return self._take(name, value, self._find_region(local_part(value), number))

    def _find_region(self, local: Tensor, micro_batch: int) -> Region:
        """Return the region of an output (B, S, H): this rank's rows and positions of the batch."""
        share = self._shares[micro_batch]
        positions: Sequence[int] = share.positions
        size = local.shape[1]
        if size != len(positions):
            start = size * self._tp
            positions = positions[start : start + size]
        rest = local.shape[2:]
        shape = (self._data.batch, self._data.seq_len, *rest)
        return Region.box(shape, (share.rows, positions, *(range(length) for length in rest)))


def _list_roots(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called once per micro-batch: the model, or each pipeline stage."""
    stages: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, pipeline.ModelStage)
    ]
    return stages or [model]


def _list_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield (logical name, root, block) of each block."""
    found: list[str] = []
    root = model
    names = dict(model.named_modules())
    for name, module in names.items():
        if isinstance(module, pipeline.ModelStage):
            root = module
        container = names[name.rpartition(".")[0]] if name else None
        is_inner = any(name.startswith(f"{other}.") for other in found)
        if isinstance(container, nn.ModuleList | nn.ModuleDict) and not is_inner:
            found.append(name)
            yield logical_name(name), root, module
