"""Metadata of distributed checkpoints as older versions of Python write them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from moeverify.tools.weights.dcp import _MetadataUnpickler


class _Getattr:
    """Pickled as a call of `getattr`, as Python before 3.11.4 pickles members of enumerations."""

    def __init__(self, owner: Any, name: str) -> None:
        self._call = getattr, (owner, name)

    def __reduce__(self) -> Any:
        return self._call


def load(owner: Any, name: str) -> Any:
    return _MetadataUnpickler(io.BytesIO(pickle.dumps(_Getattr(owner, name)))).load()


def test_a_member_of_an_enumeration_is_read() -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert load(_MEM_FORMAT_ENCODING, member.name) is member


@pytest.mark.parametrize(
    ("owner", "name"), [(_MEM_FORMAT_ENCODING, "mro"), (Metadata, "__init__")], ids=["a method", "a class"]
)
def test_other_attributes_are_refused(owner: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="does not belong into a checkpoint"):
        load(owner, name)
