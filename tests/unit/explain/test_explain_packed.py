"""Values sent to the explaining rank arrive with the same numbers, strides and shared memory."""

from __future__ import annotations

import pickle

import pytest
import torch
from recordings import make, record_call
from torch import Tensor, nn

from moeverify.explain.packed import pack, unpack


@pytest.mark.parametrize(
    "tensor",
    [
        make(6).view(2, 3).t(),
        make(6)[::2],
        make(6)[2:],
        make(3).expand(2, 3),
        torch.arange(4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(2.0),
        torch.zeros(0, 3),
        make(3).to(torch.complex64).conj(),
        make(3).requires_grad_(),
        torch.eye(2).to_sparse(),
    ],
)
def test_a_tensor_is_the_same(tensor: Tensor) -> None:
    other = unpack(pack(tensor))
    assert (other.dtype, other.shape, other.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert (other.is_conj(), other.requires_grad) == (tensor.is_conj(), tensor.requires_grad)
    assert torch.equal(other.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided:
        assert other.stride() == tensor.stride()


def test_views_share_their_memory_which_is_written_once() -> None:
    whole = make(1000)
    sent = pack([whole, whole[10:], whole.view(10, 100)])
    assert len(sent) < 1.1 * whole.nbytes
    first, second, third = unpack(sent)
    first.zero_()
    assert not second.any()
    assert not third.any()


def test_a_parameter_stays_one() -> None:
    assert isinstance(unpack(pack(nn.Parameter(make(2)))), nn.Parameter)


def test_a_program_is_the_same() -> None:
    program = record_call(lambda x: (x * 2).t().sum(0), None, x=make(6).view(2, 3))
    other = unpack(pack(program))
    assert len(other.values) == len(program.values) > 2
    for one, two in zip(program.values, other.values, strict=True):
        assert one.data is not None
        assert torch.equal(one.data, two.data)
        assert one.data.stride() == two.data.stride()
    assert len(pack(program)) < len(pickle.dumps(program))
