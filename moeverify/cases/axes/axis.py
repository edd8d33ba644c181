"""Descriptor of a mesh axis: its degree, its views, the tensors it divides, and its rules.

A descriptor contains all facts about its axis. Meshes, groups, claims and rules are derived from the
descriptors in `moeverify.cases.axes.registry`. To add an axis, write a descriptor, register it there, and add a
field to the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moeverify.cases.rule import Rule
from moeverify.cases.schema import Case, Layout
from moeverify.results.checks import Kind

ViewName = Literal["data", "dense", "sparse", "loss"]
VIEWS: tuple[ViewName, ...] = ("data", "dense", "sparse", "loss")

Part = Literal["all", "experts", "others"]


def always(_: Case) -> bool:
    """Return True: a condition that every case meets."""
    return True


def every_tensor(_: str) -> bool:
    """Return True: the axis affects all tensors."""
    return True


def in_moe_blocks(tensor: str) -> bool:
    """Return whether a tensor of the reference model is inside a mixture-of-experts block."""
    return ".moe" in tensor


def in_experts(tensor: str) -> bool:
    """Return whether a tensor of the reference model belongs to routed experts."""
    return in_moe_blocks(tensor) and ".experts" in tensor


@dataclass(frozen=True)
class Divided:
    """Tensors that the ranks of an axis hold different parts of.

    They are all tensors of `kind`, or only the ones in a `part` of the model. The check `sharding` verifies
    this wherever `applies` returns True. With part `experts` the axis makes no claim about other
    parameters, although its ranks may hold different shards of them for another reason; the reverse holds
    for `others`. Each module of the reference model that matches a pattern of `modules` contains divided
    tensors. With `once`, each of these modules is on a single rank of a group.
    """

    kind: Literal[Kind.TOKEN_LOSS, Kind.INITIAL_WEIGHT]
    part: Part = "all"
    applies: Callable[[Case], bool] = always
    modules: tuple[str, ...] = ()
    once: bool = False


@dataclass(frozen=True)
class Size:
    """A size of the reference model that the degree of an axis must divide.

    `path` is the path of the field below `recipe`; `meaning` is a phrase for messages. If the layout sets
    the field `unless`, the rule does not apply.
    """

    path: str
    meaning: str
    unless: str = ""


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh.

    `size` returns the number of ranks along the axis, and `views` the factorizations of the world that
    contain it (see `moeverify.cases.axes.mesh`). `degree` names the layout field that sets it; a derived axis has
    none.

    `batch_dim` is the dim of the global batch that the axis splits. `custom_models` says how the axis
    applies to a model that moeverify did not write: by torch's wrappers (`wrapped`), by a user's function
    (`by function`), or not at all (`no`). An axis that `places_experts` concerns only experts and the
    tokens dispatched to them.

    A diagnosis uses `label` as the name of the axis, for tensors for which `affects` returns True.
    `is_factor` is whether a wrong factor may come from its size. A union of other axes (`is_union`) is
    named only if no axis has the same groups. `is_varied` allows proposing another degree, to distinguish
    the axis from one of the same size.
    """

    name: str
    size: Callable[[Layout], int]
    views: Callable[[Layout], Sequence[ViewName]]
    degree: str = ""
    batch_dim: Literal["rows", "positions", ""] = ""
    divides: Divided | None = None
    sizes: tuple[Size, ...] = ()
    custom_models: Literal["wrapped", "by function", "no"] = "by function"
    places_experts: bool = False
    rules: tuple[Rule, ...] = ()
    affects: Callable[[str], bool] = every_tensor
    label: str = field(default="")
    is_factor: bool = True
    is_union: bool = False
    is_varied: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name)
