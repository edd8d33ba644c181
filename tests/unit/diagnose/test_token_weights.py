"""Weights of tokens, read from what a loss passes back, and the averages that are named by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moeverify.diagnose.token_groups import Fields, TokenMap
from moeverify.diagnose.token_weights import Explainer, measure_weights
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.report.words.token_weights import describe_reaveraged
from moeverify.results.cause import Cause
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.factor import Source
from moeverify.results.token_weights import Reaveraged

ROWS, LENGTH, VOCABULARY = 8, 48, 37


def make_map() -> TokenMap:
    """Return the tokens of two ranks with two micro-batches of two rows each; rows end in padding."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=torch.Generator().manual_seed(0))
    shares = {
        rank: [(range(start, start + 2), range(LENGTH)) for start in (4 * rank, 4 * rank + 2)]
        for rank in (0, 1)
    }
    fields = Fields.of((ROWS, LENGTH), shares)
    assert fields is not None
    return TokenMap(fields, torch.arange(LENGTH) < lengths)


MAP = make_map()
COUNTED = MAP.counted.double()
TOTAL = float(COUNTED.sum())
BASIC = {groups.name.unit: groups for groups in MAP.basic}
LABELS = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
ORDER = MAP.order("chunk")


def means(unit: str, size: int = 0) -> Tensor:
    """Return the weights of a sum of means over groups."""
    groups = MAP.chunk(unit, size) if size else BASIC[unit]  # type: ignore[arg-type, index]
    return TOTAL / groups.add_up(COUNTED)


def say(weights: Tensor) -> str:
    """Return what is said of weights."""
    sources = [Source(name="dp_shard", size=2), Source(name="rows of the batch", size=ROWS)]
    found = Explainer(MAP, weights, sources, {"label": LABELS}).explain()
    operation = Reaveraged(averagings=found)
    subject = Subject(quantity=Quantity.LOSS, tensors=("lm",))
    explanation = Explanation(cause=Cause.SHARE_WEIGHTS, subject=subject, operation=operation)
    return describe_reaveraged(operation, explanation) if found else ""


def draw(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.1


MEAN, SUM = "is a mean of means: each token is divided by", "is a sum of means: each token is divided by"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: means("chunk", 32), f"{SUM} the valid tokens of its chunk of 32 tokens"),
        (lambda: means("chunk", 20), f"{SUM} the valid tokens of its chunk of 20 tokens"),
        (lambda: means("row") / ROWS, f"{MEAN} the valid tokens of its row"),
        (
            lambda: means("chunk-of-positions", 16) / 12,
            f"{MEAN} the valid tokens of its chunk of 16 positions",
        ),
        (
            lambda: means("chunk", 32) * BASIC["rank"].add_up(COUNTED) / TOTAL,
            "multiplied by the share of its rank in the valid tokens of the batch",
        ),
        (
            lambda: TOTAL / (BASIC["rank"].add_up(COUNTED) - 4) / 2,
            "the valid tokens less one for each row of its rank",
        ),
        (
            lambda: BASIC["row"].add_up(COUNTED) * ROWS / TOTAL,
            "counts each token by the valid tokens of its row over",
        ),
        ((ORDER < 64).double, "leaves out the last 32 tokens of each micro-batch"),
        (
            lambda: (ORDER < 64).double() * TOTAL / float(COUNTED[ORDER < 64].sum()),
            "leaves out the last 32 tokens of each micro-batch, and divides by the valid tokens that are left",
        ),
        (lambda: 1.0 + (torch.arange(LENGTH) < 3).expand(ROWS, -1).double(), "counts 2 times positions 0-2"),
        (
            (ORDER % 3 != 2).double,
            "leaves out every one of 3 tokens of each micro-batch, that at place 2",
        ),
        (lambda: draw(VOCABULARY)[LABELS], "counts each token by a weight that its label alone tells"),
        (
            lambda: torch.full((ROWS, LENGTH), TOTAL / (ROWS * (LENGTH - 1))).double(),
            "all tokens less one for each row",
        ),
    ],
)
def test_average_is_named(make: Callable[[], Tensor], expected: str) -> None:
    assert expected in say(make())


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_said_of_weights_without_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert not say(torch.rand(ROWS, LENGTH, dtype=torch.float64, generator=generator))
    assert not say(1.0 + (torch.rand(ROWS, LENGTH, generator=generator) < 0.5).double())
    # Some rank, row or chunk that counts by a number of no name.
    some = torch.where(BASIC["rank"].ids == 0, torch.rand((), generator=generator) + 0.1, 1.0).double()
    assert "divided" not in say(some)
    assert "over" not in say(some)


def make_gradient(weights: Tensor, noise: float = 0.0) -> WrongTensor:
    expected = torch.randn(ROWS, LENGTH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected *= COUNTED.unsqueeze(-1)
    actual = expected * weights.unsqueeze(-1) + noise * expected.flip(-1)
    halves = [
        Region.box(expected.shape, (range(ROWS), range(LENGTH), dims)) for dims in (range(3), range(3, 5))
    ]
    shards = [RankShard(rank, region, region.take(actual).clone()) for rank, region in enumerate(halves)]
    return WrongTensor((0, "module gradient", ""), expected, tuple(shards))


def test_weights_are_measured_over_slices_of_the_vocabulary() -> None:
    weights = draw(ROWS, LENGTH)
    measured = measure_weights(make_gradient(weights))
    assert measured is not None
    torch.testing.assert_close(measured[0][MAP.counted], weights[MAP.counted])
    assert torch.equal(measured[1], MAP.counted)


def test_no_weights_of_another_gradient() -> None:
    assert measure_weights(make_gradient(draw(ROWS, LENGTH), noise=1e-4)) is None
