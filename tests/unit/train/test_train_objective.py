"""The losses against their formulas in loops, and sums over ranks and micro-batches against the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moeverify.cases.schema import Data, MoE
from moeverify.model.router import RouterStats, summarize
from moeverify.train.data import MicroBatch, Share, make_batch, whole_share
from moeverify.train.objective import GroupSums, Normalizers, count_valid, router_losses

NUM_EXPERTS, TOP_K, NUM_LAYERS = 6, 2, 2
DATA = Data(batch=4, seq_len=8, min_valid=0.3)


def spec(scope: str) -> MoE:
    return MoE(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        expert_hidden=8,
        balance_coef=0.3,
        balance_scope=scope,  # type: ignore[arg-type]
        z_coef=0.07,
    )


@pytest.fixture
def logits() -> Tensor:
    """Return router logits (layers, B, S, E)."""
    shape = (NUM_LAYERS, DATA.batch, DATA.seq_len, NUM_EXPERTS)
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    ).requires_grad_()


def make(share: Share) -> MicroBatch:
    return make_batch(DATA, 50, 0, 0, share, torch.device("cpu"))


def make_stats(logits: Tensor, share: Share) -> tuple[MicroBatch, list[RouterStats]]:
    batch = make(share)
    stats = []
    for layer in logits:
        part = layer[list(share.rows)][:, list(share.positions)]
        ids = part.topk(TOP_K, dim=-1).indices
        stats.append(summarize(part, part.softmax(dim=-1), ids, batch.valid))
    return batch, stats


def compute_by_hand(logits: Tensor, scope: str) -> tuple[Tensor, Tensor]:
    """Return the balance and z losses, computed token by token as in the papers."""
    batch = make(whole_share(DATA))
    num_valid = int(batch.valid.sum())
    balance, z = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for layer in logits:
        groups = [list(range(DATA.batch))] if scope == "batch" else [[row] for row in range(DATA.batch)]
        for rows in groups:
            tokens = [(b, s) for b, s in itertools.product(rows, range(DATA.seq_len)) if batch.valid[b, s]]
            for expert in range(NUM_EXPERTS):
                chosen = sum(expert in layer[b, s].topk(TOP_K).indices.tolist() for b, s in tokens)
                mean = torch.stack([layer[b, s].softmax(-1)[expert] for b, s in tokens]).mean()
                fraction = NUM_EXPERTS / TOP_K * chosen / len(tokens)
                balance = balance + fraction * mean / len(groups)
        for b, s in itertools.product(range(DATA.batch), range(DATA.seq_len)):
            if batch.valid[b, s]:
                z = z + layer[b, s].exp().sum().log() ** 2 / num_valid
    return 0.3 * balance, 0.07 * z


def differentiate(loss: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return gradient


def normalize() -> Normalizers:
    return count_valid([make(whole_share(DATA))], GroupSums(), DATA.batch)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_formulas(scope: str, logits: Tensor) -> None:
    batch, stats = make_stats(logits, whole_share(DATA))
    for found, expected in zip(
        router_losses(spec(scope), stats, batch, normalize(), GroupSums()),
        compute_by_hand(logits, scope),
        strict=True,
    ):
        assert found.item() == pytest.approx(expected.item(), rel=1e-13)
        assert torch.allclose(
            differentiate(found, logits), differentiate(expected, logits), rtol=1e-11, atol=1e-16
        )


def test_sequence_and_batch_scope_differ(logits: Tensor) -> None:
    batch, stats = make_stats(logits, whole_share(DATA))
    found = [
        router_losses(spec(scope), stats, batch, normalize(), GroupSums())[0]
        for scope in ("sequence", "batch")
    ]
    assert abs((found[0] - found[1]).item()) > 1e-4


def test_a_perfect_balance_costs_the_coefficient() -> None:
    data = Data(batch=2, seq_len=NUM_EXPERTS)
    batch = make_batch(data, 50, 0, 0, whole_share(data), torch.device("cpu"))
    ids = torch.stack([torch.arange(NUM_EXPERTS), (torch.arange(NUM_EXPERTS) + 1) % NUM_EXPERTS], dim=-1)
    flat = torch.zeros(2, NUM_EXPERTS, NUM_EXPERTS, dtype=torch.float64)
    stats = summarize(flat, flat.softmax(-1), ids.expand(2, -1, -1), batch.valid)
    normalizers = count_valid([batch], GroupSums(), 2)
    for scope in ("sequence", "batch"):
        balance, z = router_losses(spec(scope), [stats], batch, normalizers, GroupSums())
        assert balance.item() == pytest.approx(0.3, rel=1e-14)
        assert z.item() == pytest.approx(0.07 * torch.tensor(6.0).log().item() ** 2, rel=1e-6)


def count_layers(routers: Sequence[RouterStats]) -> Tensor:
    return torch.stack([stats.counts for stats in routers])


def add_up(
    scope: str, logits: Tensor, shares: Sequence[Share], peers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return the sums of the losses over ranks, each of which sees its share; `peers` see the same rows."""
    made = [make_stats(logits, share) for share in shares]
    normalizers = Normalizers(torch.stack([batch.valid.sum() for batch, _ in made]).sum(), DATA.batch)
    totals = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for rank, (batch, stats) in enumerate(made):
        mine = next(group for group in peers if rank in group)

        def over_sequence(counts: Tensor, mine: Sequence[int] = mine) -> Tensor:
            return torch.stack([count_layers(made[peer][1]) for peer in mine]).sum(dim=0)

        def over_batch(counts: Tensor) -> Tensor:
            return torch.stack([count_layers(other).sum(dim=1) for _, other in made]).sum(dim=0)

        sums = GroupSums(over_batch=over_batch, over_sequence=over_sequence)
        for number, loss in enumerate(router_losses(spec(scope), stats, batch, normalizers, sums)):
            totals[number] = totals[number] + loss
    return totals[0], totals[1]


ZIGZAG = [
    Share(rows, positions) for rows in (range(2), range(2, 4)) for positions in ((0, 1, 6, 7), range(2, 6))
]


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_addends_of_ranks_are_the_whole(scope: str, logits: Tensor) -> None:
    found = add_up(scope, logits, ZIGZAG, [[0, 1], [2, 3]])
    for part, expected in zip(found, compute_by_hand(logits, scope), strict=True):
        assert part.item() == pytest.approx(expected.item(), rel=1e-13)
        assert torch.allclose(
            differentiate(part, logits), differentiate(expected, logits), rtol=1e-11, atol=1e-16
        )


def test_addends_of_micro_batches_are_the_whole(logits: Tensor) -> None:
    parts = whole_share(DATA).micro_batches(2)
    batches = [make(part) for part in parts]
    normalizers = count_valid(batches, GroupSums(), DATA.batch)
    assert int(normalizers.num_valid) == int(make(whole_share(DATA)).valid.sum())
    assert len({int(batch.valid.sum()) for batch in batches}) == 2  # or equal weights would be right too
    totals = [torch.zeros((), dtype=torch.float64)] * 2
    for part in parts:
        batch, stats = make_stats(logits, part)
        losses = router_losses(spec("sequence"), stats, batch, normalizers, GroupSums())
        totals = [total + loss for total, loss in zip(totals, losses, strict=True)]
    for total, expected in zip(totals, compute_by_hand(logits, "sequence"), strict=True):
        assert total.item() == pytest.approx(expected.item(), rel=1e-13)
