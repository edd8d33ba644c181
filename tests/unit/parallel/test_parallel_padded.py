"""The exchange of fixed sizes: one process simulates the ranks and moves the rows between their buffers."""

from __future__ import annotations

import torch

from moeverify.model.dispatcher import unpermute
from moeverify.parallel.padded_dispatcher import combine, gather_copies, order_by_expert, plan_departures

FILLING = -1


def draw(seed: int) -> tuple[list[torch.Tensor], int, int, int]:
    """Return the ids (N, k) of each of n ranks, n, e and C."""
    generator = torch.Generator().manual_seed(seed)
    num_ranks, num_here, num_tokens = (
        int(torch.randint(1, limit, (), generator=generator)) for limit in (5, 4, 7)
    )
    num_experts = num_ranks * num_here
    top_k = int(torch.randint(1, num_experts + 1, (), generator=generator))
    ids = [
        torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=-1)[:, :top_k]
        for _ in range(num_ranks)
    ]
    return ids, num_ranks, num_here, num_tokens * min(top_k, num_here)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_every_copy_reaches_its_expert_in_order_and_comes_home() -> None:
    for seed in range(40):
        ids, num_ranks, num_here, room = draw(seed)
        sent = [plan_departures(each, num_ranks, num_here, room) for each in ids]
        for each, chosen in zip(sent, ids, strict=True):
            assert torch.equal(each.copy[each.place], torch.arange(chosen.numel()))
            assert torch.equal(each.counts, chosen.flatten().bincount(minlength=num_ranks * num_here))
        for rank in range(num_ranks):
            # Per received row: the expert, and the sender's rank and copy; padding has neither.
            incoming = torch.full((num_ranks * room, 3), FILLING)
            for source, (each, chosen) in enumerate(zip(sent, ids, strict=True)):
                here = chosen.flatten() // num_here == rank
                row = each.place[here] - rank * room + source * room
                assert ((row >= source * room) & (row < (source + 1) * room)).all()
                copies = torch.arange(chosen.numel())[here]
                incoming[row] = torch.stack([chosen.flatten()[here], copies * 0 + source, copies], dim=1)
            arriving = torch.stack([each.counts.view(num_ranks, num_here)[rank] for each in sent])
            there, back = order_by_expert(arriving, room)
            total = int(arriving.sum())
            ordered = incoming[there][:total]
            assert (ordered != FILLING).all()
            assert ordered.tolist() == sorted(ordered.tolist())
            counts = incoming[:, 0] != FILLING
            assert torch.equal(incoming[there][back][counts], incoming[counts])


def test_what_stands_in_filling_reaches_neither_outputs_nor_gradients() -> None:
    ids = torch.tensor([[0, 3], [3, 1], [3, 2]])
    departures = plan_departures(ids, 2, 2, 6)
    filling = torch.ones(12, dtype=torch.bool).index_fill(0, departures.place, False)
    assert filling.any()
    weights = normal(3, 2).requires_grad_()
    rows = normal(12, 4, seed=1).masked_fill(filling[:, None], torch.nan).requires_grad_()
    combined = combine(rows, weights, departures)
    order = departures.place.argsort()
    expected = unpermute(rows[departures.place[order]], order, weights)
    torch.testing.assert_close(combined, expected)
    slope = normal(3, 4, seed=2)
    found = torch.autograd.grad(combined, [rows, weights], slope, retain_graph=True)
    wanted = torch.autograd.grad(expected, [rows, weights], slope)
    torch.testing.assert_close(found[0][~filling], wanted[0][~filling])
    torch.testing.assert_close(found[1], wanted[1])
    x = normal(3, 4, seed=3).requires_grad_()
    copies = gather_copies(x, departures.copy // 2, departures.place)
    assert torch.equal(copies[departures.place], x.repeat_interleave(2, dim=0))
    upward = normal(12, 4, seed=4).masked_fill(filling[:, None], torch.nan)
    (of_x,) = torch.autograd.grad(copies, x, upward)
    torch.testing.assert_close(of_x, upward[departures.place].view(3, 2, 4).sum(dim=1))


def test_no_tokens_are_no_trouble() -> None:
    departures = plan_departures(torch.zeros(0, 2, dtype=torch.int64), 2, 2, 0)
    assert departures.counts.tolist() == [0, 0, 0, 0]
    there, back = order_by_expert(torch.zeros(2, 2, dtype=torch.int64), 0)
    assert (len(there), len(back)) == (0, 0)
