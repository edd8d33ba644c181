"""All mutation operators, in the order of the tables."""

from __future__ import annotations

from moeverify.faults.mutation.operators import arithmetic, collectives, control, tensors

OPERATORS = {**collectives.OPERATORS, **tensors.OPERATORS, **arithmetic.OPERATORS, **control.OPERATORS}
"""The rewriting function of each operator, by its name."""
