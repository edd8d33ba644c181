"""Base class of the hypotheses, and the outcome of a test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from moeverify.explain.fitting.families import name_family
from moeverify.explain.fitting.inputs import LM, DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.observation import Observation
from moeverify.results.operation import Operation


class Scope(IntEnum):
    """Number of tensors that a hypothesis explains at once. Wider scopes make chance matches less likely."""

    TOGETHER = 0  # all wrong tensors
    FAMILY = 1  # the same parameter in all layers
    ALONE = 2


@dataclass(frozen=True)
class Outcome:
    """The explanation of some tensors by a hypothesis whose test passed.

    `num_coefficients` counts the free numbers of the explanation. If several hypotheses explain the same
    tensors, the engine reports the one with the fewest coefficients and lists the others as rivals.
    `observations` are its evidence.
    """

    explanation: Explanation
    observations: tuple[Observation, ...] = ()
    num_coefficients: int = 0


class Hypothesis(ABC):
    """One way in which a tensor can become wrong.

    `name` is the file name of the hypothesis; `quantities` lists the quantities that it covers.
    `generalizes` names simpler hypotheses. If one of them explains the same tensors, this one would too,
    with more coefficients, and is not tested.
    """

    name: ClassVar[str]
    quantities: ClassVar[frozenset[Quantity]]
    generalizes: ClassVar[tuple[str, ...]] = ()
    own_scopes: ClassVar[tuple[Scope, ...]] = (Scope.ALONE,)

    def scopes(self, quantity: Quantity) -> tuple[Scope, ...]:
        """Return the scopes in which to test a quantity, the widest first. The default is `own_scopes`."""
        del quantity
        return self.own_scopes

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the hypothesis covers this tensor."""
        del inputs
        return tensor.quantity in self.quantities

    @abstractmethod
    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome | None:
        """Test the hypothesis on `tensors` together; return None if it does not explain them.

        There is at least one tensor, and each satisfies `applies`.
        """

    def accept(self, explanation: Explanation, *observations: Observation) -> Outcome:
        """Return the outcome of a test that passed, with the observations as evidence."""
        return Outcome(explanation, observations)


def explain_by(
    cause: Cause,
    operation: Operation,
    tensors: Sequence[WrongTensor],
    inputs: DiagnosisInputs,
    *,
    residual: float | None = None,
) -> Explanation:
    """Return an explanation of some tensors.

    The subject is the loss or the module if the tensor was read at a module end, and else the tensors
    themselves.
    """
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
