"""Families of logical tensors: the same parameter in all layers, and the tensors of experts or routers."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Component of a fully qualified name -> family.
_WORDS = {"experts": "expert", "router": "router"}


def family_of(name: str) -> str:
    """Return a parameter's name with its layer number replaced, common to all layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def name_family(names: Sequence[str]) -> str:
    """Return the common family of the tensors, such as `expert`, or an empty string."""
    for part, family in _WORDS.items():
        if names and all(part in name.split(".") for name in names):
            return family
    return ""


def module_of(parameter: str) -> str:
    """Return the module of a parameter."""
    return parameter.rpartition(".")[0]


def split_moment(name: str) -> tuple[str, str]:
    """Split the name of an optimizer state: `up.weight.exp_avg` into `up.weight` and `exp_avg`."""
    parameter, _, moment = name.rpartition(".")
    return parameter, moment
