"""Expected values for `diff --golden`: the program provides them, the debugger has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_NONE = (
    "this process knows no expected values: the ranks of `moeverify run` do, once they train under the layout, and"
    " other programs name theirs with set_reference(); for a script, `moeverify compare` compares two of its runs"
    " that `moeverify watch` has recorded"
)


@dataclass(frozen=True)
class ReferenceRow:
    """One shard of a logical tensor compared to its expected values.

    Units: `squared_error` is the sum of squared differences over the shard, and `norm` the expected norm of
    the whole tensor. `bound` limits sqrt(sum of squared errors of all shards) / norm. `region` is equal for
    replicas of one shard. `index` is the position in the whole tensor of the element that differs most.
    """

    name: str
    region: str
    squared_error: float
    norm: float
    bound: float
    index: tuple[int, ...] = ()
    expected: float = 0.0
    actual: float = 0.0


class Reference(Protocol):
    """Source of expected values. An optional string attribute `note` is shown with each answer."""

    def compare(self, value: Any, check: Callable[[], None]) -> Sequence[ReferenceRow]:
        """Return the differences of this rank's value from the expected value at the current stop.

        If the value is None, all complete values are compared. `check` is called between tensors, and
        raises when the console no longer waits for the answer.

        Raises: LookupError when nothing is known about a value. The message lists the values that can be
        compared.
        """


@dataclass
class _Registered:
    reference: Reference | None = None


_REGISTERED = _Registered()


def register_reference(reference: Reference | None) -> None:
    """Set the reference that `diff --golden` uses. None removes it."""
    _REGISTERED.reference = reference


def find_reference() -> Reference:
    """Return the registered reference. Raises LookupError when there is none."""
    if _REGISTERED.reference is None:
        raise LookupError(_NONE)
    return _REGISTERED.reference
