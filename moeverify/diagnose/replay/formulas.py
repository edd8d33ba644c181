"""The formula of what went wrong first, with the inputs that one device has there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.replay.attention import AttentionFormula
from moeverify.diagnose.replay.attention_gradient import AttentionGradientFormula
from moeverify.diagnose.replay.calls import ModuleCalls
from moeverify.diagnose.replay.chunks import Chunks
from moeverify.diagnose.replay.cross_entropy import CrossEntropyFormula, CrossEntropyGradientFormula
from moeverify.diagnose.replay.embedding import EmbeddingFormula
from moeverify.diagnose.replay.experts import ONE_DEVICE, ExpertLayout, ExpertsFormula
from moeverify.diagnose.replay.experts_gradient import CombineGradientFormula, ExpertsGradientFormula
from moeverify.diagnose.replay.language import RIGHT, NamedFormula
from moeverify.diagnose.replay.latent_gradient import LatentGradientFormula, Projection
from moeverify.diagnose.replay.norms import NormFormula
from moeverify.diagnose.replay.passed_back import list_block_gradients, list_moe_gradients
from moeverify.diagnose.replay.routed import RouterFormula
from moeverify.diagnose.replay.sharded_formulas import divide_formula, list_products
from moeverify.diagnose.replay.shards import ProductsFormula, Shards
from moeverify.diagnose.replay.tokenwise import (
    GatedFormula,
    GatedGradientFormula,
    HandedFormula,
    LinearFormula,
    SumFormula,
    TokenFormula,
    TokenGradientFormula,
)
from moeverify.model.attention import Attention
from moeverify.model.mla import LatentAttention
from moeverify.model.mlp import MLP
from moeverify.model.moe import MoE
from moeverify.model.norm import LayerNorm, RMSNorm
from moeverify.model.rope import compute_rotation, rotate
from moeverify.model.router import Router
from moeverify.model.transformer import Block
from moeverify.train.module_taps import BACKWARD, FORWARD, Reading

_DISPATCHER = "dispatcher"  # of a block of experts, as a tap calls what it reads there
_MOST_OTHERS = 24
_PROJECTIONS: Mapping[str, Literal["q", "k", "v"]] = {
    "q_proj": "q",
    "q_norm": "q",
    "k_proj": "k",
    "k_norm": "k",
    "v_proj": "v",
}


_HEAD_NORMS = ("q_norm", "k_norm")
_LATENT_PROJECTIONS: Mapping[str, Projection] = {
    "q_proj": "queries",
    "q_b_proj": "queries",
    "kv_b_proj": "heads",
    "kv_a_proj": "latent",
}


_GATED: Mapping[str, Literal["gate", "up"]] = {"gate_proj": "gate", "up_proj": "up"}


@dataclass(frozen=True)
class RightModules:
    """One device's model with the weights that the step began with, and what it read at its modules in the step.

    `chunks` says which positions each rank of a context group has; `valid` (B, S) are the tokens that are no padding,
    and `experts` says where experts live. `tokens` and `labels` (B, S) are those of the batch, `calls` gives what
    ranks give each module at once, and `shards` says how those of tp divide products.
    """

    model: nn.Module
    readings: Sequence[Reading]
    chunks: Chunks
    valid: Tensor | None
    experts: ExpertLayout = ONE_DEVICE
    tokens: Tensor | None = None
    labels: Tensor | None = None
    calls: ModuleCalls = field(default_factory=ModuleCalls)
    shards: Shards = field(default_factory=Shards)

    def find(self, name: str) -> nn.Module | None:
        """Return the module of a name, the whole model of none."""
        return dict(self.model.named_modules()).get(name)

    def read(self, module: str, end: str, direction: str = FORWARD) -> Tensor | None:
        """Return what one device read at an end of a module: its first tensor, or backward the gradient of that."""
        wanted = (direction, module, end, "0")
        return next(
            (
                each.local
                for each in self.readings
                if (each.direction, each.module, each.end, each.slot) == wanted
            ),
            None,
        )

    def list_like(self, x: Tensor, module: str) -> dict[str, Tensor]:
        """Return what else one device read forward in the shape of x, by the end of the module, the nearest first."""
        found: dict[str, Tensor] = {}
        for each in sorted(self.readings, key=lambda reading: not _is_near(reading.module, module)):
            is_like = each.direction == FORWARD and each.local.shape == x.shape
            if is_like and not any(torch.equal(each.local, other) for other in (x, *found.values())):
                found[f"{each.end}:{each.module}"] = each.local
            if len(found) >= _MOST_OTHERS:
                break
        return found

    def list_gated(self, x: Tensor, name: str) -> dict[str, Tensor]:
        """Return x (B, S, H) times what a module inside of another one makes of each token: one number."""
        found: dict[str, Tensor] = {}
        for each in self.readings:
            is_inside = each.module.startswith(f"{name}.") and each.direction == FORWARD
            if is_inside and each.local.shape == (*x.shape[:2], 1):
                found[f"gated:{each.module}"] = x * each.local.sigmoid()
                found[f"multiplied:{each.module}"] = x * each.local
        return found


def make_formula(origin: Origin, right: RightModules) -> NamedFormula | None:
    """Return the formula of what was read first wrong; None where there is none for it."""
    named = _make_undivided(origin, right)
    return divide_formula(named, origin.culprit, right.calls, right.shards)


def _make_undivided(origin: Origin, right: RightModules) -> NamedFormula | None:
    block = origin.culprit.removesuffix(f".{_DISPATCHER}")
    culprit = right.find(block)
    if culprit is None:
        return None
    if origin.direction == BACKWARD:
        inside = _make_passed_to_norm(origin, right) or _make_gradient_inside(origin, culprit, block, right)
        return inside or _make_gradient(origin, culprit, block, right)
    if isinstance(culprit, nn.Embedding):
        tokens = right.tokens
        return None if tokens is None else NamedFormula("embedding", EmbeddingFormula(culprit, tokens))
    if culprit is right.model:
        return _make_inside_model(origin, right)
    return _make_forward(origin, culprit, block, right)


def _make_forward(origin: Origin, culprit: nn.Module, block: str, right: RightModules) -> NamedFormula | None:
    """Return the formula of what a module puts out, or hands to one inside of it."""
    x = right.read(origin.culprit, "input")
    if x is None:
        return None
    if block != origin.culprit:
        return _make_experts(culprit, block, x, right) if isinstance(culprit, MoE) else None
    if origin.end == "input":
        return _make_inside(origin, culprit, x, right)
    if isinstance(culprit, Block | MoE):
        others = _list_gated(culprit, block, right) if isinstance(culprit, MoE) else {}
        return _make_sum(_list_branches(culprit, block, right), others)
    return make_tokenwise(culprit, block, x, right)


def _make_gradient_inside(
    origin: Origin, culprit: nn.Module, block: str, right: RightModules
) -> NamedFormula | None:
    """Return the formula of what a module passes back to one inside of it, or by its branches."""
    name, inner = origin.culprit, origin.module.removeprefix(f"{origin.culprit}.")
    found: NamedFormula | None = None
    if culprit is right.model and origin.end == "output":
        found = _make_loss_gradient(origin, right)
    elif isinstance(culprit, Attention) and inner in _PROJECTIONS:
        found = _make_attention_gradient(culprit, name, _PROJECTIONS[inner], origin, right)
    elif isinstance(culprit, LatentAttention) and inner in _LATENT_PROJECTIONS and origin.end == "output":
        found = _make_latent_gradient(culprit, name, inner, right)
    elif isinstance(culprit, MLP) and inner in _GATED and origin.end == "output":
        found = _make_gated_gradient(name, _GATED[inner], right)
    elif isinstance(culprit, MoE) and block == name and inner == "router":
        found = _make_combine_gradient(name, right)
    elif isinstance(culprit, Block) and (inner == "ffn_norm" or origin.end == "input"):
        branches = list_block_gradients(culprit, name, right.read, is_middle=inner == "ffn_norm")
        found = _make_sum(branches, name="gradient:branches")
    elif isinstance(culprit, MoE) and block == name and origin.end == "input":
        found = _make_sum(list_moe_gradients(culprit, name, right.read), name="gradient:branches")
    return found


def _make_passed_to_norm(origin: Origin, right: RightModules) -> NamedFormula | None:
    """Return the formula of what comes back to a norm's output, or to what takes it, by the layers that take it."""
    names = {origin.module, origin.culprit, *origin.also}
    for name in sorted(names - {""}):
        # One linear layer alone has a formula with more ways; here are those that share an input.
        is_taken = (
            name != origin.culprit if isinstance(right.find(name), nn.Linear) else name != origin.module
        )
        module = right.find(name) if is_taken or origin.end == "input" else None
        products = None if module is None else list_products(module, name, right.read)
        if products is not None and _is_sum(products, origin.tensor.expected):
            return NamedFormula(f"gradient:input:{name}", products)
    return None


def _is_sum(products: ProductsFormula, expected: Tensor) -> bool:
    total = torch.stack(list(products.terms.values())).sum(0)
    return total.shape == expected.shape and bool((total - expected).norm() <= RIGHT * expected.norm())


def _make_gradient(
    origin: Origin, culprit: nn.Module, block: str, right: RightModules
) -> NamedFormula | None:
    """Return the formula of what a module passes back to its input."""
    name = origin.culprit
    x, gradient = right.read(name, "input"), right.read(name, "output", BACKWARD)
    if x is None or gradient is None or origin.end != "input":
        return None
    if isinstance(culprit, MoE) and block != name:
        named = _make_experts(culprit, block, x, right)
    else:
        named = None if isinstance(culprit, Router) else make_tokenwise(culprit, name, x, right)
    return None if named is None else _turn_back(named, gradient)


def _turn_back(named: NamedFormula, gradient: Tensor) -> NamedFormula | None:
    """Return the formula of what a module passes back from the gradient of its output."""
    name, forward = f"gradient:{named.name}", named.formula
    if isinstance(forward, ExpertsFormula):
        return NamedFormula(name, ExpertsGradientFormula(forward, gradient))
    if not isinstance(forward, TokenFormula):
        return None
    return NamedFormula(name, TokenGradientFormula(forward, gradient))


def _make_attention_gradient(
    culprit: Attention, name: str, of: Literal["q", "k", "v"], origin: Origin, right: RightModules
) -> NamedFormula | None:
    x, gradient = right.read(name, "input"), right.read(f"{name}.o_proj", "input", BACKWARD)
    if x is None or gradient is None:
        return None
    forward = AttentionFormula(culprit, x, right.valid, right.chunks)
    formula = AttentionGradientFormula(forward, of, gradient, origin.tensor.expected)
    return NamedFormula("gradient:attention", formula)


def _make_latent_gradient(
    culprit: LatentAttention, name: str, inner: str, right: RightModules
) -> NamedFormula | None:
    x, gradient = right.read(name, "input"), right.read(f"{name}.o_proj", "input", BACKWARD)
    given = right.read(f"{name}.{inner}", "output")
    if x is None or gradient is None or given is None:
        return None
    forward = AttentionFormula(culprit, x, right.valid, right.chunks)
    formula = LatentGradientFormula(culprit, forward, _LATENT_PROJECTIONS[inner], given, gradient)
    return NamedFormula("gradient:latent-attention", formula)


def make_tokenwise(culprit: nn.Module, name: str, x: Tensor, right: RightModules) -> NamedFormula | None:
    """Return the formula of a module that computes each token of its output from its input."""
    others = right.list_like(x, name)
    if isinstance(culprit, Router):
        return NamedFormula("router", RouterFormula(culprit, x, others, right.experts.calls))
    if isinstance(culprit, RMSNorm | LayerNorm):
        return NamedFormula(
            "norm", NormFormula(culprit, x, others, _list_weights(culprit, name, right.model))
        )
    if isinstance(culprit, nn.Linear):
        weights = _list_weights(culprit, name, right.model)
        return NamedFormula("linear-layer", LinearFormula(culprit, x, others, weights))
    return None


def _make_inside(origin: Origin, culprit: nn.Module, x: Tensor, right: RightModules) -> NamedFormula | None:
    """Return the formula of what a module hands to one inside of it."""
    name, inner = origin.culprit, origin.module.removeprefix(f"{origin.culprit}.")
    if isinstance(culprit, Attention | LatentAttention) and inner == "o_proj":
        return NamedFormula("attention", AttentionFormula(culprit, x, right.valid, right.chunks))
    if isinstance(culprit, MLP) and inner == "down_proj":
        up, gate = right.read(f"{name}.up_proj", "output"), right.read(f"{name}.gate_proj", "output")
        if up is None:
            return None
        biases = _list_biases(culprit)
        return NamedFormula("feed-forward-block", GatedFormula(gate, up, biases))
    if isinstance(culprit, Block) and inner == "ffn_norm":
        return _make_sum({"residual": x, "attention": right.read(f"{name}.attention", "output")})
    handed = right.read(origin.module, "input")
    if handed is None:
        return None
    others = {**right.list_like(handed, origin.module), **right.list_gated(handed, name)}
    if isinstance(culprit, Attention) and inner in _HEAD_NORMS and culprit.norms_heads:
        positions = torch.arange(handed.shape[1])
        rotation = compute_rotation(positions[None], culprit.head_dim, culprit.rope_theta, culprit.yarn)
        others[f"rotated:{origin.module}"] = rotate(handed, rotation)
    return NamedFormula(f"input:{origin.module}", HandedFormula(handed, others))


def _list_biases(block: MLP) -> dict[str, Tensor]:
    """Return the biases of what goes into the activation, by their part of the formula."""
    parts = {"gate-bias": block.gate_proj, "up-bias": block.up_proj}
    return {
        part: layer.bias.detach()
        for part, layer in parts.items()
        if layer is not None and layer.bias is not None and bool(layer.bias.any())
    }


def _list_branches(culprit: Block | MoE, name: str, right: RightModules) -> dict[str, Tensor | None]:
    """Return what a module adds up to its output, by name."""
    if isinstance(culprit, Block):
        inner = "mlp" if culprit.mlp is not None else "moe"
        parts = ("attention", inner)
        return {
            "residual": right.read(name, "input"),
            **{part: right.read(f"{name}.{part}", "output") for part in parts},
        }
    branches = {"routed experts": right.read(f"{name}.{_DISPATCHER}", "output")}
    shared = right.read(f"{name}.shared", "output")
    if shared is not None and culprit.shared_gate is not None:
        gate = right.read(f"{name}.shared_gate", "output")
        shared = None if gate is None else shared * gate.sigmoid()
    return branches if culprit.shared is None else {**branches, "shared expert": shared}


def _list_gated(culprit: MoE, name: str, right: RightModules) -> dict[str, dict[str, Tensor]]:
    """Return what a shared expert adds where its gate is otherwise, or scaled as the combine weights are."""
    shared, gate = right.read(f"{name}.shared", "output"), right.read(f"{name}.shared_gate", "output")
    if shared is None or gate is None or culprit.shared_gate is None:
        return {}
    gates = {
        "ungated": torch.ones_like(gate),
        "raw-gate": gate,
        "tanh-gate": gate.tanh(),
        "silu-gate": torch.nn.functional.silu(gate),
        "gated-twice": gate.sigmoid().square(),
        "opposite-gate": 1.0 - gate.sigmoid(),
    }
    return {"shared expert": {way: shared * value for way, value in gates.items()}}


def _make_sum(
    terms: Mapping[str, Tensor | None],
    others: Mapping[str, Mapping[str, Tensor]] | None = None,
    name: str = "branches",
) -> NamedFormula | None:
    known = {term: value for term, value in terms.items() if value is not None}
    return NamedFormula(name, SumFormula(known, others)) if len(known) == len(terms) > 1 else None


def _make_inside_model(origin: Origin, right: RightModules) -> NamedFormula | None:
    """Return what the whole model hands to a module of its own, or puts out: its logits."""
    module = origin.module or "lm_head"
    end = "input" if origin.module else "output"
    handed = right.read(module, end)
    if handed is None:
        return None
    others = right.list_like(handed, origin.module)
    return NamedFormula(f"{end}:{module}", HandedFormula(handed, others))


def make_cross_entropy(right: RightModules) -> CrossEntropyFormula | None:
    """Return the formula of each token's loss; None where this rank has no head, or labels are not known."""
    logits = right.read("lm_head", "output")
    if logits is None or right.labels is None or logits.shape[:2] != right.labels.shape:
        return None
    return CrossEntropyFormula(logits, right.labels)


def _make_loss_gradient(origin: Origin, right: RightModules) -> NamedFormula | None:
    formula = make_cross_entropy(right)
    if formula is None or origin.tensor.expected.shape != formula.logits.shape:
        return None
    return NamedFormula("gradient:cross-entropy", CrossEntropyGradientFormula(formula))


def _make_gated_gradient(name: str, of: Literal["gate", "up"], right: RightModules) -> NamedFormula | None:
    up, gate = right.read(f"{name}.up_proj", "output"), right.read(f"{name}.gate_proj", "output")
    gradient = right.read(f"{name}.down_proj", "input", BACKWARD)
    if up is None or gradient is None:
        return None
    return NamedFormula(
        "gradient:feed-forward-block", GatedGradientFormula(GatedFormula(gate, up), of, gradient)
    )


@torch.no_grad()
def _make_experts(block: MoE, name: str, x: Tensor, right: RightModules) -> NamedFormula | None:
    came_in = right.read(f"{name}.router", "input")
    if came_in is None or not isinstance(block.router, Router):
        return None
    routing = block.router(came_in)
    others = right.list_like(x, name)
    formula = ExpertsFormula(block.experts, x, routing, others, right.experts)
    return NamedFormula("routed-experts", formula)


def list_dispatched(experts: str, right: RightModules) -> tuple[ExpertsFormula, Tensor] | None:
    """Return the formula of the routed experts of a name, and the gradient of their sum; None if unknown."""
    name = experts.rpartition(".")[0]
    block = right.find(name)
    x = right.read(f"{name}.{_DISPATCHER}", "input")
    gradient = right.read(f"{name}.{_DISPATCHER}", "output", BACKWARD)
    if x is None or gradient is None or not isinstance(block, MoE):
        return None
    named = _make_experts(block, name, x, right)
    return (
        None if named is None or not isinstance(named.formula, ExpertsFormula) else (named.formula, gradient)
    )


def _make_combine_gradient(name: str, right: RightModules) -> NamedFormula | None:
    """Return the formula of what comes back to a router's combine weights."""
    dispatched = list_dispatched(f"{name}.experts", right)
    if dispatched is None:
        return None
    return NamedFormula("gradient:combine-weights", CombineGradientFormula(*dispatched))


def _list_weights(module: nn.Module, name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of other modules of this kind with the shape of its own, the nearest in the model first."""
    found = {
        other: each.weight.detach()
        for other, each in model.named_modules()
        if type(each) is type(module) and other != name and isinstance(each.weight, Tensor)
    }
    own = module.weight
    assert isinstance(own, Tensor)
    alike = [
        key for key, weight in found.items() if weight.shape == own.shape and not torch.equal(weight, own)
    ]
    return {key: found[key] for key in sorted(alike, key=lambda key: not _is_near(key, name))[:_MOST_OTHERS]}


def _is_near(one: str, other: str) -> bool:
    """Return whether two modules are in the same layer."""
    return one.split(".")[:2] == other.split(".")[:2]
