"""Rows that are sorted twice, or not sorted back."""

from __future__ import annotations

import pytest
import torch
from generated import explain_call, read
from recordings import make
from torch import Tensor

ORDER = torch.tensor([2, 0, 3, 1, 5, 4])


def compute(x: Tensor, gates: Tensor, order: Tensor, back: Tensor) -> Tensor:
    done = x[order].sin()
    return (done[back] * gates).tanh()


@pytest.mark.parametrize(
    ("back", "name"),
    [(ORDER, "its inverse"), (torch.tensor([1, 0, 2, 3, 4, 5]), None)],
    ids=["sorted twice", "another order"],
)
def test_rows_that_the_inverse_of_an_index_repairs_are_named_at_the_index(
    back: Tensor, name: str | None
) -> None:
    inputs = {"x": make(6, 4), "gates": make(6, 1, seed=1)}
    here = torch.arange(6)
    culprit, *_ = explain_call(
        lambda x, gates: compute(x, gates, ORDER.clone(), back.clone()),
        lambda x, gates: compute(x, gates, here.clone(), here.clone()),
        **inputs,
    )
    assert (("this permutation", name) in culprit.numbers) is (name is not None)
    assert name is None or read(culprit.here) == "done[back]"
