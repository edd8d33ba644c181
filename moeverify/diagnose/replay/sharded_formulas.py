"""Which products of a formula ranks divide, by what they read of its ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from moeverify.diagnose.replay.attention_gradient import AttentionGradientFormula
from moeverify.diagnose.replay.calls import ModuleCalls
from moeverify.diagnose.replay.language import Formula, NamedFormula
from moeverify.diagnose.replay.latent_gradient import LatentGradientFormula
from moeverify.diagnose.replay.passed_back import Read
from moeverify.diagnose.replay.shards import Pair, ProductsFormula, ShardedFormula, Shards
from moeverify.diagnose.replay.tokenwise import (
    GatedGradientFormula,
    LinearFormula,
    TokenGradientFormula,
)
from moeverify.model.attention import Attention
from moeverify.model.mlp import MLP
from moeverify.train.module_taps import BACKWARD

_LAST: Mapping[type[Formula], str] = {
    AttentionGradientFormula: "o_proj",
    LatentGradientFormula: "o_proj",
    GatedGradientFormula: "down_proj",
}
"""The layer whose input a formula is given the gradient of."""


def divide_formula(
    named: NamedFormula | None, module: str, calls: ModuleCalls, shards: Shards
) -> NamedFormula | None:
    """Return a formula with what ranks may have otherwise of products that they divide, where they do."""
    if named is None or shards.size == 1:
        return named
    what = _find_divided(named.formula, module, calls, shards)
    return named if what is None else NamedFormula(named.name, ShardedFormula(named.formula, shards, what))


def _find_divided(
    formula: Formula, module: str, calls: ModuleCalls, shards: Shards
) -> Literal["sum", "result", "given"] | None:
    last = _LAST.get(type(formula))
    if last is not None:
        is_divided = calls.divides(f"{module}.{last}", "input")
        return "given" if is_divided and shards.divides(formula.gradient.shape[-1]) else None  # type: ignore[attr-defined]
    if isinstance(formula, ProductsFormula):
        is_whole = all(shards.divides(len(weight)) for _, weight in formula.pairs.values())
        return "sum" if is_whole else None
    is_back = isinstance(formula, TokenGradientFormula)
    forward = formula.forward if isinstance(formula, TokenGradientFormula) else formula
    if not isinstance(forward, LinearFormula):
        return None
    # A row-wise layer has slices of its input, and puts out a sum; backward it is the other way round.
    if calls.divides(module, "input") and shards.divides(forward.weight.shape[1]):
        return "result" if is_back else "sum"
    if calls.divides(module, "output") and shards.divides(forward.weight.shape[0]):
        return "sum" if is_back else "result"
    return None


def list_products(consumer: nn.Module, name: str, read: Read) -> ProductsFormula | None:
    """Return what the linear layers which take a module's input pass back to it, added up; None where not known."""
    if isinstance(consumer, Attention):
        layers = {each: getattr(consumer, each) for each in ("q_proj", "k_proj", "v_proj")}
    elif isinstance(consumer, MLP):
        gate = {} if consumer.gate_proj is None else {"gate_proj": consumer.gate_proj}
        layers = {**gate, "up_proj": consumer.up_proj}
    elif isinstance(consumer, nn.Linear):
        layers = {"": consumer}
    else:
        return None
    pairs: dict[str, Pair] = {}
    for inner, layer in layers.items():
        given = read(f"{name}.{inner}" if inner else name, "output", BACKWARD)
        if given is None:
            return None
        pairs[inner or name] = (given, layer.weight.detach())
    return ProductsFormula(pairs)
