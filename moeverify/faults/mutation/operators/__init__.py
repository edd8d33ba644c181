"""All mutation operators, in the order of the tables."""

from __future__ import annotations

from moeverify.faults.mutation.operators import arithmetic, collectives, control, tensors
from moeverify.faults.mutation.operators.base import MutationOperator

OPERATORS: dict[str, MutationOperator] = {
    operator.name: operator
    for module in (collectives, tensors, arithmetic, control)
    for operator in module.OPERATORS
}
