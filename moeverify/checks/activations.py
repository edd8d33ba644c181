"""Whether the output of every block equals the golden's, forward, with the first block that diverges.

A block is a child of a list of modules that lies in no other one, such as `layers.3`. A case asks for it by
`checks.also: [activations]`, since the golden then contains an output (B, S, H) of each block for each step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moeverify.checks.base import Outcome, Role, Shown, Training, Watch
from moeverify.checks.golden_tensors import GoldenTensors
from moeverify.layout.local_shard import logical_name
from moeverify.layout.observer import Observer
from moeverify.layout.placement import is_partial, local_part
from moeverify.layout.region import Region
from moeverify.parallel import pipeline
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered
from moeverify.results.place import Place, Stage


class _BlockOutputs(Watch[None]):
    """Shows the output of each block, micro-batch by micro-batch, while a rank trains."""

    def __init__(self, training: Training, observer: Observer) -> None:
        self._training = training
        self._observer = observer
        self._step = 0
        self._micro_batches: dict[nn.Module, int] = {}
        self._seen: set[tuple[str, int]] = set()
        self._handles: list[RemovableHandle] = []
        program = training.program
        self._shares = program.share.micro_batches(program.num_micro_batches)
        for root in _list_roots(program.model):
            self._handles.append(root.register_forward_pre_hook(self._count))
        for name, root, block in _list_blocks(program.model):
            self._handles.append(block.register_forward_hook(self._make_hook(name, root)))

    def begin_step(self, step: int) -> None:
        self._step = step
        self._micro_batches.clear()
        self._seen.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, root: nn.Module, inputs: Any) -> None:
        self._micro_batches[root] = self._micro_batches.get(root, -1) + 1

    def _make_hook(self, name: str, root: nn.Module) -> Any:
        def hook(block: nn.Module, inputs: Any, output: Any) -> None:
            key = (name, self._micro_batches[root])
            tensor = output[0] if isinstance(output, tuple) else output
            if key in self._seen or not isinstance(tensor, Tensor) or is_partial(tensor):
                return  # a second visit is a recomputation
            self._seen.add(key)
            local = local_part(tensor.detach())
            region = self._find_region(local, key[1])
            self._observer.observe(self._step, CheckName.ACTIVATIONS, name, local, region)

        return hook

    def _find_region(self, local: Tensor, micro_batch: int) -> Region:
        """Return the part of the output (B, S, H) that a rank computes: its rows and positions of the batch.

        Under sequence parallelism these positions are sharded over tp once more.
        """
        share = self._shares[micro_batch]
        positions: Sequence[int] = share.positions
        size = local.shape[1]
        if size != len(positions):
            start = size * self._training.coordinates["tp"]
            positions = positions[start : start + size]
        data = self._training.recipe.data
        rest = local.shape[2:]
        shape = (data.batch, data.seq_len, *rest)
        return Region.box(shape, (share.rows, positions, *(range(length) for length in rest)))


def _list_roots(model: nn.Module) -> list[nn.Module]:
    """Return what is called once a micro-batch: the model, or each stage of a pipeline."""
    stages: list[nn.Module] = [module for module in model.modules() if isinstance(module, pipeline.Stage)]
    return stages or [model]


def _list_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield (logical name, root, block) of each block."""
    found: list[str] = []
    root = model
    names = dict(model.named_modules())
    for name, module in names.items():
        if isinstance(module, pipeline.Stage):
            root = module
        container = names[name.rpartition(".")[0]] if name else None
        is_inner = any(name.startswith(f"{other}.") for other in found)
        if isinstance(container, nn.ModuleList | nn.ModuleDict) and not is_inner:
            found.append(name)
            yield logical_name(name), root, module


class Activations(GoldenTensors):
    """The outputs of all blocks against the golden's; what diverges later follows from what diverges first."""

    role = Role.ORIGIN

    def __init__(self) -> None:
        super().__init__(CheckName.ACTIVATIONS, (CheckName.ACTIVATIONS,))

    def show(self, training: Training, observer: Observer) -> Watch[None]:
        """Return what shows the outputs of the blocks; see `Check`."""
        return _BlockOutputs(training, observer)

    def judge(self, shown: Shown, reports: Sequence[Any]) -> Outcome | None:
        """Return the verdict, with the first block that diverges and all others following it; see `Check`."""
        outcome = super().judge(shown, reports)
        if outcome is None or not outcome.findings:
            return outcome
        first, *others = sorted(outcome.findings, key=_order)
        subject = Subject(quantity=Quantity.OUTPUT, tensors=(first.tensor,), module=first.tensor)
        explanation = Explanation(cause=Cause.FORWARD, subject=subject, operation=Altered())
        origin = first.model_copy(
            update={
                "code": explanation.cause.value,
                "explanation": explanation,
                "place": Place(module=first.tensor, ranks=first.ranks, stage=Stage.FORWARD),
            }
        )
        following = [finding.model_copy(update={"follows": first.tensor}) for finding in others]
        return Outcome(outcome.result, (origin, *following))


def _order(finding: Finding) -> tuple[int, list[tuple[int, str]]]:
    """Return step and name, with the numbers in the name as numbers."""
    parts = re.split(r"[.]", finding.tensor)
    return finding.step, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


CHECKS = (Activations(),)
