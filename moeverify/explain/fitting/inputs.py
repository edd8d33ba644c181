"""The data about a mismatch that hypotheses use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moeverify.explain.fitting.axes import Axes, Groups
from moeverify.explain.fitting.components import ComponentSource
from moeverify.explain.fitting.first_divergence import Divergence, Search
from moeverify.explain.fitting.wrong_tensor import Key, WrongTensor
from moeverify.parallel.regions.region import Region
from moeverify.results.collective import IssuedCollective
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Source
from moeverify.train.module_taps import BACKWARD

# Name of the language-model loss term.
LM = "lm"

# Quantities computed from all tensors: every axis affects them.
_OF_THE_RUN = (Quantity.LOSS, Quantity.GRADIENT_NORM, Quantity.CLIP_COEFFICIENT)

Read = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class Saved:
    """A saved state. `read` returns a whole tensor by name.

    `by_shape` has the names of the saved tensors of each shape; `wrong` has the names that were loaded
    wrong.
    """

    read: Read
    by_shape: Mapping[tuple[int, ...], Sequence[str]]
    wrong: Collection[str]


@dataclass(frozen=True)
class Issued:
    """Collectives that a rank issued in a module, or in the nearest enclosing module that issued any."""

    module: str = ""
    collectives: tuple[IssuedCollective, ...] = ()


@dataclass
class DiagnosisInputs:
    """The data about a mismatch that hypotheses use.

    - `search`: first modules that differ; None if modules were not compared.
    - `earlier(key)`: the golden's value of a tensor one step earlier.
    - `issued(module, rank)`: the collectives of a module on a rank.
    - `stale(origin)`: whether the weights of the step before produce the module's output; None if unknown.
    - `saved`: the saved state, after a load.
    - `regions`: the region of each parameter on each rank.
    - `decays`: by moment name, the factor of its previous value in the optimizer step.
    - `shapes`: by name, (golden shape, shape under the layout) of tensors whose shapes differ.
    - `limits`: by check, the relative error that it detects in half of its tensors.
    """

    tensors: Mapping[Key, WrongTensor] = field(default_factory=dict)
    axes: Axes = field(default_factory=lambda: Axes({}))
    search: Search | None = None
    earlier: Callable[[Key], Tensor | None] = lambda key: None
    issued: Callable[[str, int], Issued] = lambda module, rank: Issued()
    components: ComponentSource = lambda: None
    stale: Callable[[Divergence], bool | None] = lambda origin: None
    saved: Saved | None = None
    regions: Mapping[str, Mapping[int, Region]] = field(default_factory=dict)
    decays: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, Divergence]:
        """Return the first divergence of each direction."""
        return self.search.origins if self.search is not None else {}

    def origin_of(self, tensor: WrongTensor) -> Divergence | None:
        """Return the module end where a tensor was read; None if it is not a module reading."""
        return next((origin for origin in self.origins.values() if origin.tensor is tensor), None)

    def comes_from_loss(self, origin: Divergence) -> bool:
        """Return whether a loss passes back a wrong gradient, that is, no earlier gradient is right.

        Logits receive a gradient from the lm loss alone.
        """
        is_first = self.search is not None and not self.search.num_right[BACKWARD]
        return origin.direction == BACKWARD and origin.end == "output" and not origin.culprit and is_first

    def sources_of(self, tensors: Sequence[WrongTensor]) -> list[Source]:
        """Return the integers of the run that may explain a factor of these tensors."""
        if any(tensor.quantity in _OF_THE_RUN for tensor in tensors):
            return list(self.axes.sources)
        return self.axes.sources_of(*map(self._name, tensors))

    def groups_of(self, tensor: WrongTensor) -> Groups:
        """Return the rank groups of the axes that affect a tensor."""
        return self.axes.groups if tensor.quantity in _OF_THE_RUN else self.axes.groups_of(self._name(tensor))

    def _name(self, tensor: WrongTensor) -> str:
        """Return the name to look up axes by: the module of a reading, or else the tensor."""
        origin = self.origin_of(tensor)
        return tensor.name if origin is None else origin.culprit

    def of_quantity(self, *quantities: Quantity) -> list[WrongTensor]:
        """Return the wrong tensors of some quantities, in the order of `quantities`."""
        return [
            tensor
            for quantity in quantities
            for tensor in self.tensors.values()
            if tensor.quantity is quantity
        ]
