"""Which formula gives the gradient of a parameter, by the module that has it."""

from __future__ import annotations

from torch import nn

from moeverify.diagnose.families import module_of
from moeverify.diagnose.replay.formulas import RightModules, list_dispatched, make_tokenwise
from moeverify.diagnose.replay.language import NamedFormula
from moeverify.diagnose.replay.parameters import (
    EmbeddingGradientFormula,
    ModuleParameterFormula,
    ParameterGradientFormula,
)
from moeverify.diagnose.replay.tokenwise import TokenFormula
from moeverify.model.experts import Experts
from moeverify.train.module_taps import BACKWARD


def make_parameter_formula(name: str, right: RightModules) -> NamedFormula | None:
    """Return the formula of a parameter's gradient; None where there is none for its module."""
    module = module_of(name)
    attribute = name[len(module) + 1 :]
    owner = right.find(module)
    found: ParameterGradientFormula | None = None
    if isinstance(owner, Experts):
        dispatched = list_dispatched(module, right)
        if dispatched is not None:
            found = ModuleParameterFormula(dispatched[0], attribute, dispatched[1])
    elif owner is not None:
        found = _make(owner, module, attribute, right)
    return None if found is None else NamedFormula(f"parameter:{attribute}", found)


def _make(
    owner: nn.Module, module: str, attribute: str, right: RightModules
) -> ParameterGradientFormula | None:
    gradient = right.read(module, "output", BACKWARD)
    if gradient is None:
        return None
    if isinstance(owner, nn.Embedding):
        return None if right.tokens is None else EmbeddingGradientFormula(owner, right.tokens, gradient)
    x = right.read(module, "input")
    named = None if x is None else make_tokenwise(owner, module, x, right)
    forward = None if named is None else named.formula
    if not isinstance(forward, TokenFormula) or getattr(forward, attribute, None) is None:
        return None
    return ModuleParameterFormula(forward, attribute, gradient)
