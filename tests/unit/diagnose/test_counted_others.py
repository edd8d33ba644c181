"""A router that counts as many choices as it should, but those of other tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from wrong_tensors import examine, make_inputs, make_tensor

from moeverify.diagnose.hypotheses.base import Outcome
from moeverify.results.cause import Cause
from moeverify.results.operation import Miscounted

IDS = torch.randint(0, 8, (4, 16, 2), generator=torch.Generator().manual_seed(0))
VALID = torch.arange(16) < torch.tensor([[16], [13], [9], [14]])


def count(valid: Tensor) -> Tensor:
    return torch.bincount(IDS[valid].flatten(), minlength=8).to(torch.float64)


def ask(actual: Tensor, *, valid: Tensor = VALID) -> Outcome:
    tensor = make_tensor(count(VALID), count(VALID), actual, name="layers.1.moe.router", kind="router_counts")
    golden = lambda kind, name, before: IDS if (kind, before) == ("router_ids", 0) else None  # noqa: E731
    return examine("counted_others", tensor, make_inputs(tensor, valid=valid, golden=golden))


@pytest.mark.parametrize("shift", [1, 5, 8, 15])
def test_a_mask_that_is_shifted_is_named(shift: int) -> None:
    explanation = ask(count(VALID.roll(shift, 1))).explanation
    assert explanation.cause is Cause.STATE
    assert isinstance(explanation.operation, Miscounted)
    assert (explanation.operation.shift, explanation.operation.rank) == (shift, 1)


def test_other_counts_of_as_many_choices_are_not() -> None:
    assert ask(count(VALID).roll(1)).explanation is None
    assert ask(count(VALID.flip(1))).explanation is None


def test_where_the_mask_does_not_give_the_right_counts_nothing_is_said() -> None:
    assert ask(count(VALID.roll(8, 1)), valid=VALID.roll(3, 1)).explanation is None
