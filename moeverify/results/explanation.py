"""Explanations of wrong tensors: an operation on parts of a quantity, with measured factors."""

from __future__ import annotations

from enum import StrEnum

from moeverify.results.cause import Cause
from moeverify.results.factor import Factor, Product
from moeverify.results.operation import (
    Altered,
    Carried,
    Misplaced,
    NormOfSlices,
    Operation,
    OwnValues,
    Scaled,
    Unreduced,
)
from moeverify.results.part import WHOLE
from moeverify.results.record import Record
from moeverify.results.upstream import OffUpstream


class Quantity(StrEnum):
    """The wrong quantity, by its place in a training step."""

    INITIAL_VALUE = "initial value"
    OUTPUT = "output"  # of a module with correct inputs
    EXPERT_CHOICE = "expert choice"  # of a router
    ROUTING_WEIGHT = "routing weight"
    ROUTING_COUNT = "routing count"
    LOSS = "loss"  # the reported value
    GRADIENT = "gradient"  # of a parameter
    MODULE_GRADIENT = "module gradient"  # of a module's output or input
    GRADIENT_NORM = "gradient norm"
    CLIP_COEFFICIENT = "clip coefficient"
    UPDATE = "update"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"
    LOADED = "loaded value"  # after a checkpoint was loaded
    TENSOR = "tensor"  # of a kind that only its own check handles


class Subject(Record):
    """The subject of an explanation: a quantity of some tensors, or of one module.

    `tensors` are all explained tensors. `family` is their common family, such as expert or router, if they
    have one. `inner` is a module inside `module` whose input or input gradient was read instead.
    """

    quantity: Quantity
    tensors: tuple[str, ...] = ()
    module: str = ""
    inner: str = ""
    family: str = ""


class Explanation(Record):
    """A cause that explains the measured numbers: the operation, its subject and its size.

    `residual` is the unexplained remainder: relative to the error for a fit, otherwise relative to the
    tensor. `is_estimate` marks a fit that holds only within rounding of 16 bits, without earlier values to
    compare.
    """

    cause: Cause
    subject: Subject
    operation: Operation
    residual: float | None = None
    is_estimate: bool = False

    @property
    def candidates(self) -> tuple[Product, ...]:
        """Return the products of sources that explain the numbers equally well.

        More than one product is an ambiguity.
        """
        if isinstance(self.operation, Unreduced | Misplaced | NormOfSlices):
            return self.operation.axes
        return tuple(dict.fromkeys(product for factor in self.factors for product in factor.equals))

    @property
    def names_operation(self) -> bool:
        """Return whether the explanation names an operation, not only the location or size of the error.

        A factor that equals no number of the run
        is only a measurement, unless only some replicas have it. A factor of zero is one too, because a
        missing sum can also leave zero. The first micro-batch in which a module differs names no operation
        either. For nondeterminism, the difference between runs is itself the explanation.
        """
        operation = self.operation
        if isinstance(operation, Altered):
            return self.cause is Cause.NONDETERMINISM
        if isinstance(operation, OwnValues | OffUpstream):
            return False
        if isinstance(operation, Carried) and operation.factor is not None:
            return operation.factor.is_zero or bool(operation.factor.equals)
        if isinstance(operation, Scaled):
            return bool(operation.ranks or operation.loss_scale) or any(
                each.part != WHOLE or each.factor.equals for each in operation.contributions
            )
        return True

    def keep(self, left: tuple[Product, ...]) -> Explanation:
        """Return the explanation restricted to the candidates in `left`."""

        def narrow(factor: Factor) -> Factor:
            return factor.model_copy(update={"equals": tuple(each for each in factor.equals if each in left)})

        operation = self.operation
        if isinstance(operation, Unreduced):
            axes = tuple(axis for axis in operation.axes if axis in left)
            operation = operation.model_copy(update={"axes": axes, "factor": narrow(operation.factor)})
        elif isinstance(operation, Misplaced | NormOfSlices):
            axes = tuple(axis for axis in operation.axes if axis in left)
            operation = operation.model_copy(update={"axes": axes})
        elif isinstance(operation, Carried) and operation.factor is not None:
            operation = operation.model_copy(update={"factor": narrow(operation.factor)})
        elif isinstance(operation, Scaled):
            kept = tuple(
                each.model_copy(update={"factor": narrow(each.factor)}) for each in operation.contributions
            )
            means = operation.means_factor
            fields = {"contributions": kept, "means_factor": None if means is None else narrow(means)}
            operation = operation.model_copy(update=fields)
        return self.model_copy(update={"operation": operation})

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Return the measured factors."""
        if isinstance(self.operation, Unreduced):
            return (self.operation.factor,)
        if isinstance(self.operation, Carried):
            return () if self.operation.factor is None else (self.operation.factor,)
        if isinstance(self.operation, Scaled):
            extra = (self.operation.means_factor,) if self.operation.means_factor is not None else ()
            return (*(each.factor for each in self.operation.contributions), *extra)
        return ()
