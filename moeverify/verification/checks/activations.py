"""Check that the forward output of every block equals the golden's, and find the first block that differs.

`moeverify.train.block_ends` defines the blocks. The check is optional (`checks.also: [activations]`),
because it adds the output of each block, (B, S, H), to the golden at each step.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moeverify.parallel.regions.observer import Observer
from moeverify.parallel.regions.placement import is_partial, local_part
from moeverify.parallel.regions.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import CheckName
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.finding import Finding
from moeverify.results.operation import Altered
from moeverify.results.place import Place, Stage
from moeverify.train.block_ends import BlockEnds
from moeverify.verification.checks.base import CheckOutcome, Role, ShownTensors, Training, Watch
from moeverify.verification.checks.golden_tensors import GoldenTensors


class BlockWatch(Watch[None], ABC):
    """Hooks on the outputs of blocks while a rank trains; `_take` gets each one (see `BlockEnds`)."""

    def __init__(self, training: Training, observer: Observer, first: str = "") -> None:
        self._training = training
        self._observer = observer
        self._step = 0
        tp = training.coordinates.get("tp", 0)
        self._ends = BlockEnds(training.program, training.recipe.data, tp, self._take, first=first)

    def begin_step(self, step: int) -> None:
        self._step = step
        self._ends.begin_step()

    def close(self) -> None:
        self._ends.close()

    @abstractmethod
    def _take(self, name: str, value: Tensor, region: Region) -> Tensor:
        """Return the output that the next block gets."""


class _BlockOutputs(BlockWatch):
    """Shows the output of each block, per micro-batch."""

    def _take(self, name: str, value: Tensor, region: Region) -> Tensor:
        # The golden has the sum, with which a summand cannot be compared.
        if not is_partial(value):
            local = local_part(value.detach())
            self._observer.observe(self._step, CheckName.ACTIVATIONS, name, local, region)
        return value


class Activations(GoldenTensors):
    """Comparison of all block outputs with the golden. Findings after the first one follow from it."""

    role = Role.ORIGIN

    def __init__(self) -> None:
        super().__init__(CheckName.ACTIVATIONS, (CheckName.ACTIVATIONS,))

    def show(self, training: Training, observer: Observer) -> Watch[None]:
        """Return a watch that shows the block outputs; see `Check`."""
        return _BlockOutputs(training, observer)

    def judge(self, shown: ShownTensors, reports: Sequence[Any]) -> CheckOutcome | None:
        """Return the verdict: the first block that differs, and later ones as consequences; see `Check`."""
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
        return CheckOutcome(outcome.result, (origin, *following))


def _order(finding: Finding) -> tuple[int, list[tuple[int, str]]]:
    """Return the step and the name, split at dots, with numeric parts as integers."""
    parts = re.split(r"[.]", finding.tensor)
    return finding.step, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


CHECKS = (Activations(),)
