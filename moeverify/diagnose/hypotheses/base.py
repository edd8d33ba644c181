"""The interface of a hypothesis: the tensors it is about, and the outcome of its test on some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from moeverify.diagnose.families import name_family
from moeverify.diagnose.inputs import LM, DiagnosisInputs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.observation import Observation
from moeverify.results.operation import Operation
from moeverify.results.trial import Reason, Trial


class Scope(IntEnum):
    """How many tensors a hypothesis must explain at once; the wider, the less can be chance."""

    TOGETHER = 0  # all that are wrong
    FAMILY = 1  # the same parameter of all layers
    ALONE = 2


@dataclass(frozen=True)
class Outcome:
    """What a hypothesis says of some tensors: its tests, and the explanation if one of them says yes.

    `num_coefficients` are the free numbers in the explanation: of two that explain as well, the one with fewer is
    reported and the other is its rival. `observations` are the evidence for it.
    """

    trials: tuple[Trial, ...] = ()
    explanation: Explanation | None = None
    observations: tuple[Observation, ...] = ()
    num_coefficients: int = 0


class Hypothesis(ABC):
    """One way in which a tensor can have become wrong.

    `name` is the name of its file; `quantities` are those that it can be about. If a hypothesis of `generalizes`
    explains the same tensors, this one would explain them too, with more coefficients, and is not tested.
    """

    name: ClassVar[str]
    quantities: ClassVar[frozenset[Quantity]]
    generalizes: ClassVar[tuple[str, ...]] = ()
    own_scopes: ClassVar[tuple[Scope, ...]] = (Scope.ALONE,)

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return how many tensors of a quantity it is tested on at once, the widest first: `own_scopes` of any."""
        del quantity
        return self.own_scopes

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether it is about this tensor at all; one that is not leaves no trace in the log."""
        del inputs
        return tensor.quantity in self.quantities

    @abstractmethod
    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Return what it says of these tensors together; it applies to each of them, and there is at least one."""

    def untried(self, reason: Reason) -> Outcome:
        """Return that there was nothing to look at."""
        return Outcome((Trial(hypothesis=self.name, verdict="untried", reason=reason),))

    def refuse(self, *observations: Observation, reason: Reason | None = None, **fields: Any) -> Outcome:
        """Return that the test says no, with what was seen."""
        trial = Trial(hypothesis=self.name, verdict="no", reason=reason, observations=observations, **fields)
        return Outcome((trial,))

    def accept(self, explanation: Explanation, *observations: Observation, **fields: Any) -> Outcome:
        """Return that the test says yes, with what was seen, which is also the evidence."""
        trial = Trial(hypothesis=self.name, verdict="yes", observations=observations, **fields)
        return Outcome((trial,), explanation, observations)


def explain_by(
    cause: Cause,
    operation: Operation,
    tensors: Sequence[WrongTensor],
    inputs: DiagnosisInputs,
    *,
    residual: float | None = None,
) -> Explanation:
    """Return the explanation of some tensors, or of the module or loss that made the only one, where it was read."""
    origin = inputs.origin_of(tensors[0])
    if origin is not None and inputs.comes_from_loss(origin):
        subject = Subject(quantity=tensors[0].quantity, tensors=(LM,))
    elif origin is not None:
        inner = "" if origin.is_of_culprit else origin.module
        subject = Subject(quantity=tensors[0].quantity, module=origin.culprit, inner=inner)
    else:
        names = tuple(tensor.name for tensor in tensors)
        subject = Subject(quantity=tensors[0].quantity, tensors=names, family=name_family(names))
    return Explanation(cause=cause, subject=subject, operation=operation, residual=residual)
