"""Families of logical tensors: the same parameter of all layers, and all tensors of experts or of routers."""

from __future__ import annotations

import re
from collections.abc import Sequence

# A part of a fully qualified name -> what a tensor with it belongs to.
_WORDS = {"experts": "expert", "router": "router"}


def family_of(name: str) -> str:
    """Return a parameter's name without its layer, so that the same parameter of all layers is one family."""
    return re.sub(r"\.\d+\.", ".*.", name)


def name_family(names: Sequence[str]) -> str:
    """Return what all of these tensors belong to, such as `expert`, or nothing."""
    for part, family in _WORDS.items():
        if names and all(part in name.split(".") for name in names):
            return family
    return ""


def number_layer(name: str) -> int | None:
    """Return the number of the layer that a parameter or a module is in, from 0 on."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found.group(1))


def module_of(parameter: str) -> str:
    """Return the module that has a parameter."""
    return parameter.rpartition(".")[0]


def split_moment(name: str) -> tuple[str, str]:
    """Return the parameter and the moment of an optimizer state: `up.weight` and `exp_avg` of `up.weight.exp_avg`."""
    parameter, _, moment = name.rpartition(".")
    return parameter, moment
