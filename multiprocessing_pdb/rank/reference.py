"""What a program expects of its own tensors, for `diff --golden`: the debugger knows no goldens, programs do."""

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
    """One shard of a logical tensor against its expected values.

    Units: `squared_error` is the sum of squared differences over the shard, `norm` the expected norm of the whole
    tensor, and `bound` what sqrt(sum of squared errors of all shards) / norm may be. `region` is equal for replicas
    of one shard. The element that differs most has the index `index` in the whole tensor.
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
    """Where expected values come from. One with a text `note` shows that beside each answer: what it leaves out."""

    def compare(self, value: Any, check: Callable[[], None]) -> Sequence[ReferenceRow]:
        """Return how a value of this rank differs from what is expected where the rank is stopped.

        Without a value (None) everything is compared that is complete here. `check` is called between tensors and
        raises when nobody waits for the answer any longer.

        Raises: LookupError, with what can be compared, for a value of which nothing is known.
        """


@dataclass
class _Registered:
    reference: Reference | None = None


_REGISTERED = _Registered()


def register_reference(reference: Reference | None) -> None:
    """Have `diff --golden` ask this from now on; None ends that."""
    _REGISTERED.reference = reference


def find_reference() -> Reference:
    """Return what was registered. Raises LookupError."""
    if _REGISTERED.reference is None:
        raise LookupError(_NONE)
    return _REGISTERED.reference
