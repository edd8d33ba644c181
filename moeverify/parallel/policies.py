"""Policies of mixed precision that FSDP follows, and a way to run a layout without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

_DTYPES = {
    MixedPrecisionPolicy: ("param_dtype", "reduce_dtype", "output_dtype"),
    MixedPrecision: ("param_dtype", "reduce_dtype", "buffer_dtype"),
}


@contextmanager
def without_policies() -> Iterator[None]:
    """Let FSDP1 and FSDP2 compute and reduce in the dtype of the parameters.

    The dtypes of every policy read as None, also those of policies that user code made on import.
    """
    with ExitStack() as stack:
        for policy, names in _DTYPES.items():
            for name in names:
                stack.enter_context(mock.patch.object(policy, name, _Unset(name)))
        yield


class _Unset:
    """An attribute that keeps each value that is set, and reads as None."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> None:
        return None

    def __set__(self, instance: Any, value: object) -> None:
        instance.__dict__[self._name] = value
