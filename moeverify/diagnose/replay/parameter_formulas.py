"""Which formula gives the gradient of a parameter, by the module that has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeverify.diagnose.families import module_of
from moeverify.diagnose.replay.calls import list_expert_calls
from moeverify.diagnose.replay.counted_tokens import COPIES, CountedTokens
from moeverify.diagnose.replay.formulas import RightModules, list_dispatched, make_tokenwise
from moeverify.diagnose.replay.language import NamedFormula
from moeverify.diagnose.replay.parameters import (
    EmbeddingGradientFormula,
    ModuleParameterFormula,
    ParameterGradientFormula,
)
from moeverify.diagnose.replay.passed_back import list_moe_gradients
from moeverify.diagnose.replay.tokenwise import LinearFormula, TokenFormula
from moeverify.model.experts import Experts
from moeverify.model.moe import MoE
from moeverify.model.router import Router
from moeverify.train.module_taps import BACKWARD


def make_parameter_formula(name: str, right: RightModules) -> NamedFormula | None:
    """Return the formula of a parameter's gradient; None where there is none for its module."""
    module = module_of(name)
    attribute = name[len(module) + 1 :]
    owner = right.find(module)
    found: ParameterGradientFormula | None = None
    if isinstance(owner, Experts):
        found = _make_of_experts(module, attribute, right)
    elif isinstance(owner, Router):
        found = _make_of_router(owner, module, attribute, right)
    elif owner is not None:
        found = _make(owner, module, attribute, right)
    return None if found is None else NamedFormula(f"parameter:{attribute}", found)


def _make_of_experts(module: str, attribute: str, right: RightModules) -> ParameterGradientFormula | None:
    dispatched = list_dispatched(module, right)
    if dispatched is None:
        return None
    forward, gradient = dispatched
    calls = list_expert_calls(forward.exchanges.calls, forward.ids, forward.count)
    counted = CountedTokens(calls, forward.ids.shape, part=COPIES)
    return ModuleParameterFormula(forward, attribute, gradient, counted)


def _make_of_router(
    owner: Router, module: str, attribute: str, right: RightModules
) -> ParameterGradientFormula | None:
    """Return that of a router, whose logits have a gradient of the combine weights and of its losses.

    It is what the router passes back, which its weight determines where there are no more experts than it is wide.
    """
    around = module_of(module)
    block, x = right.find(around), right.read(module, "input")
    if not isinstance(block, MoE) or x is None or owner.weight.shape[0] > owner.weight.shape[1]:
        return None
    passed = list_moe_gradients(block, around, right.read).get("router")
    if passed is None or getattr(owner, attribute, None) is None:
        return None
    weight = owner.weight.detach()
    gradient = passed @ torch.linalg.pinv(weight)
    forward = LinearFormula(owner, x, right.list_like(x, module), {})
    return ModuleParameterFormula(forward, attribute, gradient, _count(module, gradient, right))


def _make(
    owner: nn.Module, module: str, attribute: str, right: RightModules
) -> ParameterGradientFormula | None:
    gradient = right.read(module, "output", BACKWARD)
    if gradient is None:
        return None
    counted = _count(module, gradient, right)
    if isinstance(owner, nn.Embedding):
        tokens = right.tokens
        return None if tokens is None else EmbeddingGradientFormula(owner, tokens, gradient, counted)
    x = right.read(module, "input")
    named = None if x is None else make_tokenwise(owner, module, x, right)
    forward = None if named is None else named.formula
    if not isinstance(forward, TokenFormula) or getattr(forward, attribute, None) is None:
        return None
    return ModuleParameterFormula(forward, attribute, gradient, counted)


def _count(module: str, gradient: Tensor, right: RightModules) -> CountedTokens:
    shape = gradient.shape[:-1]
    return CountedTokens(right.calls.find(module, shape), shape, right.valid)
