from __future__ import annotations

import torch

from moeverify.model.dispatcher import gather_copies, invert, permute_rows, sort_copies
from moeverify.parallel.expert import order_by_expert


def test_gathered_copies_bring_their_gradients_home(make_normal) -> None:
    x = make_normal(6, 3).requires_grad_()
    ids = make_normal(6, 5, seed=1).argsort(dim=-1)[:, :2]
    _, order = sort_copies(ids, 5)
    assert torch.equal(gather_copies(x, order), x[order // 2])
    assert torch.autograd.gradcheck(lambda value: gather_copies(value, order), x)


def test_permuted_rows_are_an_index(make_normal) -> None:
    x, order = (
        make_normal(7, 2).requires_grad_(),
        torch.randperm(7, generator=torch.Generator().manual_seed(0)),
    )
    assert torch.equal(permute_rows(x, order, invert(order)), x[order])
    assert torch.autograd.gradcheck(lambda value: permute_rows(value, order, invert(order)), x)


def test_rows_are_ordered_by_expert_and_then_by_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        num_ranks, num_experts = torch.randint(1, 6, (2,), generator=generator).tolist()
        arriving = torch.randint(0, 4, (num_ranks, num_experts), generator=generator)
        num_rows = int(arriving.sum())
        owner = torch.arange(num_experts).repeat(num_ranks).repeat_interleave(arriving.flatten())
        there, back = order_by_expert(arriving, num_rows)
        assert torch.equal(there, owner.argsort(stable=True))
        assert torch.equal(there[back], torch.arange(num_rows))
