"""The cross entropy of the reference model."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from moeverify.train.data import IGNORED
from moeverify.train.forward import cross_entropy


@pytest.mark.parametrize(("most", "is_kept"), [(1 << 27, True), (40, False), (1, False)])
def test_chunks_of_tokens_equal_the_whole_and_keep_no_copy(
    monkeypatch: pytest.MonkeyPatch, most: int, is_kept: bool
) -> None:
    monkeypatch.setattr("moeverify.train.forward.MOST_LOGITS", most)
    logits = torch.linspace(-3, 5, 2 * 8 * 10, dtype=torch.float64).sin().view(2, 8, 10).requires_grad_()
    targets = torch.arange(16).view(2, 8) % 10
    targets[1, 5:] = IGNORED
    expected = F.cross_entropy(logits.mT, targets, reduction="none", ignore_index=IGNORED)
    copies: list[int] = []

    def note(saved: torch.Tensor) -> torch.Tensor:
        if saved.dtype.is_floating_point and saved.data_ptr() != logits.data_ptr():
            copies.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        actual = cross_entropy(logits, targets)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)
    assert (logits.numel() in copies) is is_kept
    weight = torch.arange(16, dtype=torch.float64).view(2, 8)
    grads = [torch.autograd.grad((loss * weight).sum(), logits)[0] for loss in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-13, atol=1e-15)
