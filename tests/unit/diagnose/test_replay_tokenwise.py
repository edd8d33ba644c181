"""Replays of norms, linear layers, feed-forward blocks, branches, routers and experts of the reference model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import EXPERTS, break_model, make_model, name_changes, read_right
from torch import Tensor, nn
from torch.nn import functional
from wrong_tensors import make_tensor

from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.experts import ExpertsFormula
from moeverify.diagnose.replay.experts_gradient import ExpertsGradientFormula
from moeverify.diagnose.replay.formulas import RightModules, make_formula
from moeverify.diagnose.replay.language import Cell, find_variant
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.model import transformer
from moeverify.model.dispatcher import LocalDispatcher, permute, unpermute
from moeverify.model.mlp import MLP
from moeverify.model.moe import MoE
from moeverify.model.norm import LayerNorm, RMSNorm
from moeverify.model.router import Router
from moeverify.report.words.variant import describe_variant
from moeverify.results.change import Change


def _norm_with(eps: float) -> Callable[[RMSNorm, Tensor], Tensor]:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weight

    return forward


def _norm_of_halves(self: RMSNorm, x: Tensor) -> Tensor:
    halves = [half * torch.rsqrt(half.square().mean(-1, keepdim=True) + self.eps) for half in x.chunk(2, -1)]
    return torch.cat(halves, -1) * self.weight


def _layer_norm_kept(self: LayerNorm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def _norm_of_first_half(self: RMSNorm, x: Tensor) -> Tensor:
    mean = x[..., : x.shape[-1] // 2].square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + self.eps) * self.weight


def _norm_of_sums(self: RMSNorm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(2.0 * x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def _other_slice(self: nn.Linear, x: Tensor) -> Tensor:
    product = functional.linear(x, self.weight)
    whole = product.roll(product.shape[-1] // 2, -1)
    return whole if self.bias is None else whole + self.bias


def _over_tokens(self: Router, chosen: Tensor) -> Tensor:
    return chosen / chosen.sum(1, keepdim=True)


def _exchanged(self: MLP, x: Tensor) -> Tensor:
    assert self.gate_proj is not None
    down: Tensor = self.down_proj(functional.silu(self.up_proj(x)) * self.gate_proj(x))
    return down


def _relu(self: MLP, x: Tensor) -> Tensor:
    assert self.gate_proj is not None
    down: Tensor = self.down_proj(functional.relu(self.gate_proj(x)) * self.up_proj(x))
    return down


def _not_normed(x: Tensor, positions: Tensor, a: nn.Module, attention: nn.Module, f: nn.Module) -> Any:
    x = x + attention(x, positions)
    return x, f(x)


def _residual_of_norm(x: Tensor, positions: Tensor, a: nn.Module, attention: nn.Module, f: nn.Module) -> Any:
    x = 1.5 * x + attention(a(x), positions)
    return x, f(x)


def _without_shared(self: MoE, x: Tensor, valid: Tensor | None = None) -> Any:
    routing = self.router(x, valid)
    ids, weights = routing.ids.flatten(0, 1), routing.weights.flatten(0, 1)
    return self.dispatcher(x.flatten(0, 1), ids, weights, self.experts).view_as(x), routing.stats


def _dispatch(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    def call(self: LocalDispatcher, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        ids, weights = change(ids, weights)
        copies = permute(x, ids, self.num_experts)
        return unpermute(experts(copies.x, copies.counts), copies.order, weights)

    return call


def _weigh_unscaled(self: Router, chosen: Tensor) -> Tensor:
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


def _in_weights(self: Router, chosen: Tensor) -> Tensor:
    return chosen.softmax(-1) * self.spec.route_scale


def _no_bias(self: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, self.weight)


CASES: dict[str, tuple[str, Any, str, Any, tuple[str, str]]] = {
    "no eps": ("stress", RMSNorm, "forward", _norm_with(0.0), ("eps", "none")),
    "eps": ("stress", RMSNorm, "forward", _norm_with(3e-3), ("eps", "value")),
    "halves": ("stress", RMSNorm, "forward", _norm_of_halves, ("mean", "parts")),
    "layer norm": ("stress-tied", LayerNorm, "forward", _layer_norm_kept, ("centre", "kept")),
    "gate": ("stress", MLP, "forward", _exchanged, ("gate", "exchanged")),
    "activation": ("stress", MLP, "forward", _relu, ("activation", "relu")),
    "input": ("stress", transformer, "mix_tokens", _not_normed, ("input", "of-module")),
    "residual": ("stress", transformer, "mix_tokens", _residual_of_norm, ("term-0", "times")),
    "shared": ("stress", MoE, "forward", _without_shared, ("term-1", "none")),
    "order": (
        "stress",
        LocalDispatcher,
        "__call__",
        _dispatch(lambda i, w: (i, w.flip(-1))),
        ("weights", "reversed"),
    ),
    "expert": (
        "stress",
        LocalDispatcher,
        "__call__",
        _dispatch(lambda i, w: (i % 8, w)),
        ("experts", "first-rank"),
    ),
    "choice": (
        "stress",
        LocalDispatcher,
        "__call__",
        _dispatch(lambda i, w: (i, torch.cat([w[:, :2], 0 * w[:, 2:]], dim=1))),
        ("choices", "without"),
    ),
    "softmax": ("stress", Router, "weigh", _in_weights, ("normalization", "softmax")),
    "first half": ("stress", RMSNorm, "forward", _norm_of_first_half, ("mean", "first-part")),
    "sums": ("stress", RMSNorm, "forward", _norm_of_sums, ("mean", "times")),
    "slices": ("stress", nn.Linear, "forward", _other_slice, ("rows", "slices-reversed")),
    "tokens": ("stress", Router, "weigh", _over_tokens, ("normalization", "over-tokens")),
    "bias": ("stress", nn.Linear, "forward", _no_bias, ("bias", "none")),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_module_computes_otherwise_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset, target, attribute, wrong, change = CASES[name]
    if target is transformer:
        target, attribute = make_model(preset).layers["0"], "mix"
    origin, right = break_model(preset, monkeypatch, target, attribute, wrong)
    named = make_formula(origin, right)
    assert named is not None
    found = find_variant(named.formula, origin.tensor, 1e-9)
    assert name_changes(found) == [[change]]
    assert found is not None
    assert found.residual < 1e-8


NOISY = [("stress", RMSNorm), ("stress", MLP), ("stress", nn.Linear), ("stress", LocalDispatcher)]


@pytest.mark.parametrize(("preset", "target"), [*NOISY, ("stress-tied", LayerNorm)])
def test_noise_is_no_variant(preset: str, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute = "__call__" if target is LocalDispatcher else "forward"
    original = getattr(target, attribute)
    generator = torch.Generator().manual_seed(0)

    def noisy(self: Any, *arguments: Any) -> Tensor:
        value = original(self, *arguments)
        noise: Tensor = 0.1 * torch.randn(value.shape, dtype=value.dtype, generator=generator)
        return noise + value

    origin, right = break_model(preset, monkeypatch, target, attribute, noisy)
    named = make_formula(origin, right)
    assert named is None or name_changes(find_variant(named.formula, origin.tensor, 1e-9)) == []


@pytest.mark.parametrize("preset", ["stress", "stress-tied", "tiny-deepseek-v3"])
def test_all_ways_of_all_formulas_have_words_of_their_own(preset: str) -> None:
    model, right = make_model(preset), read_right(preset)
    modules = RightModules(model, right, Chunks([(0, 1, 6, 7), (2, 3, 4, 5)]), None, EXPERTS)
    names = set()
    for reading in right:
        around = reading.module.rpartition(".")[0] if reading.end == "input" else ""
        origin = Origin("forward", reading.module, reading.end, 1.0, (0,), UNKNOWN, around=around)  # type: ignore[arg-type]
        named = make_formula(origin, modules)
        if named is None:
            continue
        names.add(named.name.partition(":")[0])
        ways = [*named.formula.ways, *named.formula.fits]
        texts = [describe_variant(named.name, [way]) for way in ways]
        assert all(text and "{" not in text for text in texts)
        assert len(set(texts)) >= len({(way.part, way.way, way.number, way.name) for way in ways}) - len(
            _ALIKE
        )
    assert {"attention", "norm", "linear-layer", "router", "routed-experts"} <= names


UNKNOWN = make_tensor(torch.zeros(1, 1, 1, dtype=torch.float64))
# The largest score of a chunk may be its own, or that so far in one of two orders: a reader is told the same.
_ALIKE = range(6)


@pytest.mark.parametrize("wrong", ["own experts", "noise"])
def test_what_a_block_of_experts_passes_back(wrong: str) -> None:
    model, right = make_model("stress"), read_right("stress")
    modules = RightModules(model, right, Chunks([range(8)]), None, EXPERTS)
    came_in = modules.read("layers.1.moe.dispatcher", "input")
    assert came_in is not None
    named = make_formula(
        Origin("forward", "layers.1.moe.dispatcher", "output", 1.0, (0,), make_tensor(came_in)), modules
    )
    assert named is not None
    assert isinstance(named.formula, ExpertsFormula)
    formula = ExpertsGradientFormula(named.formula, torch.ones_like(came_in))
    region = Region.whole(came_in.shape)
    cell = Cell.of(RankShard(0, region, came_in))
    expected = formula.evaluate(cell, {})
    actual = formula.evaluate(cell, {"choices": Change(part="choices", way="own-rank")})
    value = actual if wrong == "own experts" else expected + actual.abs()
    tensor = WrongTensor((0, "module gradient", "moe"), expected, (RankShard(0, region, value),))
    found = find_variant(formula, tensor, 1e-9)
    names = {each for changes in name_changes(found) or [] for each in changes}
    # On one rank alone its own experts, those of rank 0 and all but those of rank 1 are the same.
    rivals = {("choices", way) for way in ("own-rank", "only-rank", "without-rank")}
    assert names == (rivals if wrong == "own experts" else set())
