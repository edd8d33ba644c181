from __future__ import annotations

import torch

from moeverify.tools.bench.operations import count_operations


def test_what_computes_counts_and_views_and_memory_do_not() -> None:
    x = torch.ones(4, 3)
    assert count_operations(lambda: (x + 1).mul_(2)).kernels == 2
    assert count_operations(lambda: x.t()[1:].unsqueeze(0).expand(5, 2, 4)).kernels == 0
    assert count_operations(lambda: torch.empty(3).new_empty(2)).kernels == 0


def test_a_backward_pass_counts() -> None:
    x = torch.ones(4, requires_grad=True)
    y = (x * x).sum()
    # A product for each factor and their sum; the result of `sum` is a view, but its 1 is filled in.
    assert count_operations(y.backward).kernels == 4


def test_what_the_host_must_know_is_a_wait() -> None:
    x = torch.arange(3)

    def wait() -> None:
        x.sum().item()
        x.tolist()
        if x.any():
            x.nonzero()

    assert count_operations(wait).waits == 4
    assert count_operations(lambda: torch.where(x > 1, x, 0)).waits == 0
