"""The grammar of mistakes: members of its classes that it was not written for are named, and others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from replays import LENGTH, ROWS, ZIGZAG, Heads, break_model, make_model, name_changes
from torch import Tensor, nn
from torch.nn import functional

from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.hypotheses.rounding import HYPOTHESIS as ROUNDING
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.replay.activations import activate, list_derivatives
from moeverify.diagnose.replay.cross_entropy import CrossEntropyFormula, CrossEntropyGradientFormula
from moeverify.diagnose.replay.formulas import make_formula
from moeverify.diagnose.replay.grammar import weigh_gradient, with_gradient_of
from moeverify.diagnose.replay.language import Cell, Formula, Found, find_variant
from moeverify.diagnose.replay.tokenwise import GatedFormula, GatedGradientFormula, SumFormula, TokenFormula
from moeverify.diagnose.wrong_tensor import MODULE_KINDS, RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.model import transformer
from moeverify.model.mlp import MLP
from moeverify.model.norm import RMSNorm
from moeverify.results.change import Change
from moeverify.train.data import IGNORED

SHAPE = (ROWS, LENGTH, 12)


def _draw(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _explain(formula: Formula, expected: Tensor, actual: Tensor) -> Found | None:
    shard = RankShard(0, Region.whole(expected.shape), actual)
    return find_variant(formula, WrongTensor((0, MODULE_KINDS["forward"], "m"), expected, (shard,)), 1e-9)


def _norm_of_power(self: RMSNorm, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + self.eps) ** 0.4 * self.weight


def _capped_norm(self: RMSNorm, x: Tensor) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
    return 0.7 * torch.tanh(normed / 0.7)


def _identity(self: RMSNorm, x: Tensor) -> Tensor:
    return x


def _swish(self: MLP, x: Tensor) -> Tensor:
    assert self.gate_proj is not None
    gate = self.gate_proj(x)
    down: Tensor = self.down_proj(gate * torch.sigmoid(1.3 * gate) * self.up_proj(x))
    return down


def _clamped_up(self: MLP, x: Tensor) -> Tensor:
    assert self.gate_proj is not None
    down: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x).clamp(-0.2, 0.2))
    return down


def _rows_before(self: nn.Embedding, tokens: Tensor) -> Tensor:
    return self.weight[(tokens - 1) % len(self.weight)]


def _scaled(self: nn.Embedding, tokens: Tensor) -> Tensor:
    return self.weight[tokens] * 3.7


def _tripled(x: Tensor, positions: Tensor, a: nn.Module, attention: nn.Module, f: nn.Module) -> Any:
    x = x + 3.0 * attention(a(x), positions)
    return x, f(x)


MODULES: dict[str, tuple[Any, str, Any, tuple[str, str]]] = {
    "power": (RMSNorm, "forward", _norm_of_power, ("root", "power")),
    "cap": (RMSNorm, "forward", _capped_norm, ("output-through", "capped")),
    "identity": (RMSNorm, "forward", _identity, ("all", "identity")),
    "swish": (MLP, "forward", _swish, ("activation", "swish")),
    "clamp": (MLP, "forward", _clamped_up, ("clamp", "up")),
    "row": (nn.Embedding, "forward", _rows_before, ("rows", "shifted")),
    "scaled": (nn.Embedding, "forward", _scaled, ("output-through", "times")),
    "branch": (transformer, "mix_tokens", _tripled, ("term-1", "times")),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_mistake_of_the_grammar_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, wrong, change = MODULES[name]
    if target is transformer:
        target, attribute = make_model("stress").layers["0"], "mix"
    origin, right = break_model("stress", monkeypatch, target, attribute, wrong)
    named = make_formula(origin, right)
    assert named is not None
    assert name_changes(find_variant(named.formula, origin.tensor, 1e-9)) == [[change]]


def test_a_number_is_fitted_to_what_somebody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, right = break_model("stress", monkeypatch, RMSNorm, "forward", _capped_norm)
    named = make_formula(origin, right)
    assert named is not None
    found = find_variant(named.formula, origin.tensor, 1e-9)
    assert found is not None
    assert [change.number for changes in found.variants for change in changes] == [0.7]


class _Doubled(TokenFormula):
    """Tokens that a way of its own makes as a function that anything may pass through does: without their signs."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, {})
        self.ways = [*self.ways, Change(part="sign", way="none")]

    def compute(self, x: Tensor, cell: Cell, changes: Mapping[str, Change]) -> Tensor:
        return x.abs() if "sign" in changes else x


def test_a_part_of_a_formula_is_said_and_not_a_function_that_does_the_same() -> None:
    x = _draw(0)
    assert name_changes(_explain(_Doubled(x), x, x.abs())) == [[("sign", "none")]]


def test_a_function_of_two_tokens_is_none_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RMSNorm.forward

    def mixed(self: RMSNorm, x: Tensor) -> Tensor:
        normed = original(self, x)
        return normed + 0.1 * normed.roll(1, 1) * normed

    origin, right = break_model("stress", monkeypatch, RMSNorm, "forward", mixed)
    named = make_formula(origin, right)
    assert named is not None
    assert name_changes(find_variant(named.formula, origin.tensor, 1e-9)) == []


Compute = Callable[[Heads, Tensor], Tensor]


def _weigh(heads: Heads, own: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return outputs by other weights of the scores (B, N, s, S), which are not masked, and what is hidden."""
    q, k = heads.turn(heads.q)[:, own], heads.turn(heads.k).repeat_interleave(2, 2)
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * 8**-0.5
    hidden = torch.arange(LENGTH) > own[:, None]
    return torch.einsum("bnst,btnd->bsnd", change(scores, hidden), heads.v.repeat_interleave(2, 2))


ATTENTION: dict[str, tuple[Compute, tuple[str, str]]] = {
    "tanh of values": (lambda h, own: h.attend(own, v=h.v.tanh()), ("values-through", "tanh")),
    "normalized heads": (
        lambda h, own: functional.normalize(h.attend(own), dim=-1),
        ("heads-through", "of-unit-length"),
    ),
    "finite mask": (
        lambda h, own: _weigh(h, own, lambda s, hidden: (s - 2.5 * hidden).softmax(-1)),
        ("hidden", "lowered"),
    ),
    "by distance": (
        lambda h, own: _weigh(
            h,
            own,
            lambda s, hidden: (
                (s - 0.3 * (own[:, None] - torch.arange(LENGTH))).masked_fill(hidden, -torch.inf).softmax(-1)
            ),
        ),
        ("scores", "distance"),
    ),
    "sigmoid": (
        lambda h, own: _weigh(h, own, lambda s, hidden: s.sigmoid() * ~hidden),
        ("softmax", "sigmoid"),
    ),
    "prefix": (
        lambda h, own: h.attend(own, key_positions=torch.where(h.positions < 3, 0, h.positions)),
        ("reach", "prefix"),
    ),
    "rotated values": (
        lambda h, own: h.attend(own, v=h.turn(h.v, -h.positions)),
        ("value-rotation", "opposite"),
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_a_mistake_inside_of_attention_is_named(name: str) -> None:
    heads = Heads()
    compute, change = ATTENTION[name]
    assert name_changes(heads.explain(lambda rank, own: compute(heads, own))) == [[change]]


def test_scores_with_a_bias_of_their_own_are_no_mistake_that_is_known() -> None:
    heads = Heads()
    bias = _draw(7, (LENGTH, LENGTH))
    found = heads.explain(
        lambda rank, own: _weigh(
            heads, own, lambda s, hidden: (s + bias[own]).masked_fill(hidden, -torch.inf).softmax(-1)
        )
    )
    assert name_changes(found) == []


@pytest.mark.parametrize("times", [0.0, 2.0, 0.3])
def test_a_gradient_inside_of_attention_that_counts_otherwise_is_named(times: float) -> None:
    heads = Heads()
    names = {0.0: "none", 2.0: "twice"}
    # Of what comes back to the keys that by the softmax's denominator is a part.
    formula = heads.formula

    def compute(rank: int, own: Tensor, expected: Tensor, gradient: Tensor) -> Tensor:
        leaf = heads.k.clone().requires_grad_()
        scores = torch.einsum(
            "bsnd,btnd->bnst", heads.turn(heads.q), heads.turn(leaf).repeat_interleave(2, 2)
        )
        scores = scores * 8**-0.5
        hidden = torch.arange(LENGTH) > torch.arange(LENGTH)[:, None]
        share = scores.masked_fill(hidden, -torch.inf).exp()
        total = share.sum(-1, keepdim=True)
        total = total.detach() + times * (total - total.detach())
        mixed = torch.einsum("bnst,btnd->bsnd", share / total, heads.v.repeat_interleave(2, 2))
        (found,) = torch.autograd.grad(mixed.flatten(2), leaf, gradient)
        return found[:, own]

    found = heads.explain_gradient("k", compute)
    assert formula.backward
    assert found is not None
    assert [[(each.part, each.way, each.name) for each in changes] for changes in found.variants] == [
        [("gradient-of", names.get(times, "times"), "denominator")]
    ]


def test_a_gradient_counts_otherwise_and_a_value_does_not() -> None:
    leaf = _draw(0).requires_grad_()
    change = {"gradient-of:up": Change(part="gradient-of", way="times", number=0.25, name="up")}
    value = weigh_gradient(leaf * 1.0, "up", change)
    assert torch.equal(value, leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert torch.allclose(gradient, torch.full_like(gradient, 0.25))
    (other,) = torch.autograd.grad(with_gradient_of(leaf.tanh(), 3.0 * leaf).sum(), leaf)
    assert torch.equal(other, torch.full_like(other, 3.0))


@pytest.mark.parametrize(("of", "way"), [("gate", "relu"), ("gate", "linear"), ("up", "none")])
def test_the_gradient_of_another_activation_is_named(of: Any, way: str) -> None:
    gate, up, gradient = _draw(0), _draw(1), _draw(2)
    formula = GatedGradientFormula(GatedFormula(gate, up), of, gradient)
    one, two = gate.clone().requires_grad_(), up.clone().requires_grad_()
    leaf = one if of == "gate" else two
    (expected,) = torch.autograd.grad(activate(one, two, {}), leaf, gradient)
    part = "derivative" if of == "gate" else "activation"
    (actual,) = torch.autograd.grad(activate(one, two, {part: Change(part=part, way=way)}), leaf, gradient)
    assert (part, way) in [
        pair for changes in name_changes(_explain(formula, expected, actual)) or [] for pair in changes
    ]
    assert name_changes(_explain(formula, expected, expected + 0.1 * _draw(3) * expected)) == []
    assert {each.part for each in list_derivatives(has_gate=True)} == {"derivative"}


def test_a_sum_of_branches_tells_a_term_from_all_of_it() -> None:
    terms = {"residual": _draw(0), "attention": _draw(1)}
    expected = terms["residual"] + terms["attention"]
    formula = SumFormula(terms)
    assert name_changes(_explain(formula, expected, expected + 0.3 * terms["attention"])) == [
        [("term-1", "times")]
    ]
    assert name_changes(_explain(formula, expected, expected + terms["residual"] * terms["attention"])) == []


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


def _divide_by_deviation(self: RMSNorm, x: Tensor) -> Tensor:
    return x / (x.std(-1, keepdim=True) + self.eps) * self.weight


def test_two_parts_of_a_norm_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, right = break_model("stress", monkeypatch, RMSNorm, "forward", _divide_by_deviation)
    named = make_formula(origin, right)
    assert named is not None
    found = name_changes(find_variant(named.formula, origin.tensor, 1e-9)) or []
    assert [sorted(changes) for changes in found] == [[("eps", "outside"), ("mean", "unbiased-deviation")]]


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


def test_ranks_of_a_ring_are_told_apart() -> None:
    heads = Heads()
    found = heads.explain(
        lambda rank, own: heads.attend(own, v=heads.v.tanh()) if rank else heads.attend(own)
    )
    assert found is not None
    assert found.ranks == (1,)
    assert len(ZIGZAG) == 2
