"""A mesh axis as data: its degree, the views that it is a factor of, what it divides, and what it goes together with.

Everything that is said of an axis stands in its descriptor. Meshes, groups, claims and rules are derived from the
descriptors in `moeverify.axes.registry`, so a new axis is a descriptor, a line there, and a field of the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moeverify.case.rule import Rule
from moeverify.case.schema import Case, Layout
from moeverify.results.checks import Kind

ViewName = Literal["data", "dense", "sparse", "loss"]
VIEWS: tuple[ViewName, ...] = ("data", "dense", "sparse", "loss")

Part = Literal["all", "experts", "others"]


def always(_: Case) -> bool:
    """Return True: a condition that every case meets."""
    return True


def every_tensor(_: str) -> bool:
    """Return True: an axis that has to do with all tensors."""
    return True


def in_moe_blocks(tensor: str) -> bool:
    """Return whether a tensor of the reference model is inside a mixture-of-experts block."""
    return ".moe" in tensor


def in_experts(tensor: str) -> bool:
    """Return whether a tensor of the reference model belongs to routed experts."""
    return in_moe_blocks(tensor) and ".experts" in tensor


@dataclass(frozen=True)
class Divided:
    """What the ranks of an axis hold different parts of: the tensors of a kind, or those of one part of the model.

    The check `sharding` holds the layout to it wherever `applies` says so. Of an axis that cuts experts alone the
    other parameters say nothing, although its ranks may hold different shards of them for another reason; and the
    other way round. `modules` are patterns of modules of the reference model in each of which something is divided;
    with `once` each of these is on one rank of a group alone.
    """

    kind: Literal[Kind.TOKEN_LOSS, Kind.INITIAL_WEIGHT]
    part: Part = "all"
    applies: Callable[[Case], bool] = always
    modules: tuple[str, ...] = ()
    once: bool = False


@dataclass(frozen=True)
class Size:
    """A size of the reference model that the degree of an axis must divide.

    `path` is that of the field below `recipe`; `meaning` says what it counts. Where the field `unless` of the layout
    is set, nothing need be divided.
    """

    path: str
    meaning: str
    unless: str = ""


@dataclass(frozen=True)
class Axis:
    """One axis of the device mesh.

    `size` is the number of ranks along it, and `views` lists the factorizations of the world that it is a factor of
    (see `moeverify.axes.mesh`). `degree` names the field of the layout that sets it; a derived axis has none.

    `batch_dim` is the dim of the global batch that it splits. To a model that moeverify did not write it is applied
    by torch's own wrappers (`wrapped`), `by function` of the user's, or not at all (`custom_models`). An axis that
    `places_experts` is about experts alone, and the tokens that travel to them.

    A diagnosis calls the axis by its `label`, of the tensors for which `affects` is true; `is_factor` says whether a
    wrong factor may come from its size. A union of other axes is named only where no axis has the same groups.
    `is_varied` lets another degree be proposed to tell it apart from an axis of the same size.
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
