"""Losses with a part of their formula otherwise: those of the grammar are named, and others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeverify.diagnose.cross_entropy.formula import CrossEntropyFormula, CrossEntropyGradientFormula
from moeverify.diagnose.cross_entropy.search import Formula, Found, find_variant
from moeverify.diagnose.cross_entropy.ways import weigh_gradient
from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.hypotheses.rounding import HYPOTHESIS as ROUNDING
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.results.change import Change
from moeverify.train.data import IGNORED

ROWS, LENGTH = 2, 8
SHAPE = (ROWS, LENGTH, 12)


def _draw(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def name_changes(found: Found | None) -> list[list[tuple[str, str]]] | None:
    """Return part and way of the changes of all variants."""
    return (
        None if found is None else [[(each.part, each.way) for each in changes] for changes in found.variants]
    )


def _explain(formula: Formula, expected: Tensor, actual: Tensor) -> Found | None:
    shard = RankShard(0, Region.whole(expected.shape), actual)
    return find_variant(formula, WrongTensor((0, MODULE_KINDS["forward"], "m"), expected, (shard,)), 1e-9)


LOGITS, LABELS = 2.0 * _draw(4), torch.randint(0, 12, SHAPE[:2], generator=torch.Generator().manual_seed(5))
LABELS[0, 5:] = IGNORED


def _losses(logits: Tensor) -> Tensor:
    flat = functional.cross_entropy(
        logits.flatten(0, 1), LABELS.flatten(), reduction="none", ignore_index=IGNORED
    )
    return flat.view(LABELS.shape)


def _smooth(logits: Tensor) -> Tensor:
    spread = logits.logsumexp(-1) - logits.mean(-1)
    return (0.8 * _losses(logits) + 0.2 * spread) * (LABELS != IGNORED)


def _weighted(logits: Tensor) -> Tensor:
    """Weights of classes are a tensor that is not known here."""
    return _losses(logits) * torch.linspace(0.2, 1.5, 12, dtype=torch.float64)[LABELS.clamp(min=0)]


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], list[list[tuple[str, str]]]]] = {
    "smoothing": (_smooth, [[("smoothing", "all")]]),
    "cap": (lambda logits: _losses(1.7 * torch.tanh(logits / 1.7)), [[("logits-through", "capped")]]),
    "focal": (
        lambda logits: (1 - (-_losses(logits)).exp()) ** 1.5 * _losses(logits),
        [[("loss", "focal")]],
    ),
    "largest": (
        lambda logits: (_losses(logits) - logits.amax(-1)) * (LABELS != IGNORED),
        [[("denominator", "less-largest")]],
    ),
    "classes": (_weighted, []),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_a_part_otherwise_is_named_by_its_value_and_its_gradient(name: str) -> None:
    compute, changes = LOSSES[name]
    formula = CrossEntropyFormula(LOGITS, LABELS)
    right, wrong = _losses(LOGITS).unsqueeze(-1), compute(LOGITS).unsqueeze(-1)
    found = name_changes(_explain(formula, right, wrong)) or []
    assert [each for each in found if each in changes] == changes
    gradients = []
    for each in (_losses, compute):
        leaf = LOGITS.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(each(leaf).sum() / (LABELS != IGNORED).sum(), leaf)
        gradients.append(gradient)
    passed = name_changes(_explain(CrossEntropyGradientFormula(formula), *gradients)) or []
    assert [each for each in passed if each in changes] == changes
    if not changes:
        assert not [each for each in found if each in passed]


def test_a_gradient_counts_otherwise_and_a_value_does_not() -> None:
    leaf = _draw(0).requires_grad_()
    change = {"gradient-of:label": Change(part="gradient-of", way="times", number=0.25, name="label")}
    value = weigh_gradient(leaf * 1.0, "label", change)
    assert torch.equal(value, leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert torch.allclose(gradient, torch.full_like(gradient, 0.25))


def test_a_number_is_fitted_to_what_somebody_wrote() -> None:
    wrong = 1.7 * torch.tanh(LOGITS / 1.7)
    found = _explain(
        CrossEntropyFormula(LOGITS, LABELS), *(_losses(x).unsqueeze(-1) for x in (LOGITS, wrong))
    )
    assert found is not None
    assert [each.number for changes in found.variants for each in changes] == [1.7]


def test_tokens_that_alone_have_another_loss_are_counted() -> None:
    right = _losses(LOGITS).unsqueeze(-1)
    wrong = torch.where(torch.arange(LENGTH).unsqueeze(-1) < 3, right.square(), right)
    found = _explain(CrossEntropyFormula(LOGITS, LABELS), right, wrong)
    assert name_changes(found) == [[("loss", "squared")]]
    assert found is not None
    assert found.tokens == (6, ROWS * LENGTH)


def test_ranks_that_alone_have_another_loss_are_named() -> None:
    right = _losses(LOGITS).unsqueeze(-1)
    shards = tuple(
        RankShard(rank, Region.box(right.shape, ((rank,), range(LENGTH), range(1))), value[rank : rank + 1])
        for rank, value in enumerate((right, right.exp() * (LABELS != IGNORED).unsqueeze(-1)))
    )
    tensor = WrongTensor((0, MODULE_KINDS["forward"], "m"), right, shards)
    found = find_variant(CrossEntropyFormula(LOGITS, LABELS), tensor, 1e-9)
    assert found is not None
    assert name_changes(found) == [[("loss", "exponential")]]
    assert found.ranks == (1,)


@pytest.mark.parametrize("is_rounded", [True, False])
def test_a_wrong_number_of_each_token_is_no_rounding(is_rounded: bool) -> None:
    expected = _draw(0, (8, 16, 32))
    scale = 1.0 + 0.01 * _draw(1, (8, 16, 1))
    wrong = scale.bfloat16().double() / scale if is_rounded else scale
    shard = RankShard(0, Region.whole(expected.shape), expected * wrong)
    tensor = WrongTensor((0, MODULE_KINDS["forward"], "norm"), expected, (shard,))
    origin = Origin("forward", "norm", "output", 1.0, (0,), tensor)
    search = Search({"forward": origin}, {"forward": 1, "backward": 1}, {"forward": 0.0}, 1e-9)
    outcome = ROUNDING.test([tensor], DiagnosisInputs(search=search))
    assert (outcome.explanation is not None) == is_rounded


def test_a_term_that_makes_nearly_all_numbers_larger_is_no_rounding() -> None:
    leaf = LOGITS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(_losses(leaf).sum(), leaf)
    actual = expected + 2e-3 * LOGITS.softmax(-1) * (LABELS != IGNORED).unsqueeze(-1)
    tensor = WrongTensor(
        (0, MODULE_KINDS["backward"], "lm_head"),
        expected.repeat(4, 1, 1),
        (RankShard(0, Region.whole((8, *expected.shape[1:])), actual.repeat(4, 1, 1)),),
    )
    origin = Origin("backward", "lm_head", "output", 1.0, (0,), tensor)
    search = Search({"backward": origin}, {"forward": 1, "backward": 0}, {"backward": 0.0}, 1e-9)
    assert ROUNDING.test([tensor], DiagnosisInputs(search=search)).explanation is None
