"""Everything that was gathered about a mismatch, for the hypotheses to look at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moeverify.diagnose.axes import Axes, Groups
from moeverify.diagnose.components import ComponentSource
from moeverify.diagnose.first_divergence import Origin, Search
from moeverify.diagnose.wrong_tensor import Key, WrongTensor
from moeverify.layout.region import Indices, Region
from moeverify.results.collective import IssuedCollective
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Source
from moeverify.train.module_taps import BACKWARD

# The loss term of the tokens.
LM = "lm"

# What the golden's value at another time is called.
STEP_BEFORE, INITIAL_VALUE = "step-before", "initial-value"

# Numbers that are made of all tensors, so that every axis has to do with them.
_OF_THE_RUN = (Quantity.LOSS, Quantity.GRADIENT_NORM, Quantity.CLIP_COEFFICIENT)

Read = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class Saved:
    """A saved state: `read` gives a whole tensor of it by name.

    `by_shape` has the names of all saved tensors of a shape, `wrong` those that were loaded wrong.
    """

    read: Read
    by_shape: Mapping[tuple[int, ...], Sequence[str]]
    wrong: Collection[str]


@dataclass(frozen=True)
class Issued:
    """The collectives that a rank issued inside a module, or inside the nearest one around it that has some."""

    module: str = ""
    collectives: tuple[IssuedCollective, ...] = ()


@dataclass
class DiagnosisInputs:
    """Everything that was gathered about a mismatch.

    `search` says where modules first differ, None where that was not asked. `earlier` gives the golden's value of a
    tensor at other times, by what these are called. `issued` gives the collectives of a module on a rank.
    `num_tokens` are the tokens of the batch with padding. `stale` says whether the weights of a step earlier give
    what a module put out, None where that cannot be asked. `saved` is there after a load. `regions` says what each
    rank has of each parameter. `golden(kind, name, before)` gives the golden's value so many steps before this one.
    `valid` (B, S) are the tokens that are no padding. `decays` gives, by the name of an optimizer's moment, the
    factor that its value of the step before has in a step's sum. `shapes` has, of what has another shape under the
    layout, the golden's and that one. `micro_batches` has by rank the rows and positions of each micro-batch.
    `limits` has, by the name of each check, the relative error that it sees in half of its tensors.
    """

    tensors: Mapping[Key, WrongTensor] = field(default_factory=dict)
    axes: Axes = field(default_factory=lambda: Axes({}))
    search: Search | None = None
    earlier: Callable[[Key], Mapping[str, Tensor | None]] = lambda key: {}
    issued: Callable[[str, int], Issued] = lambda module, rank: Issued()
    components: ComponentSource | None = None
    num_tokens: int = 0
    stale: Callable[[Origin], bool | None] = lambda origin: None
    saved: Saved | None = None
    regions: Mapping[str, Mapping[int, Region]] = field(default_factory=dict)
    golden: Callable[[str, str, int], Tensor | None] = lambda kind, name, before: None
    valid: Tensor | None = None
    decays: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    micro_batches: Mapping[int, Sequence[tuple[Indices, Indices]]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Return where each direction first differs."""
        return self.search.origins if self.search is not None else {}

    def origin_of(self, tensor: WrongTensor) -> Origin | None:
        """Return where in a module a tensor was read; None for what is no module's output or gradient."""
        search = self.search
        around = (*search.around.values(), *search.beside.values()) if search is not None else ()
        known = [*self.origins.values(), *(each for found in around for each in found)]
        return next((origin for origin in known if origin.tensor is tensor), None)

    def list_beside(self, tensor: WrongTensor) -> Sequence[WrongTensor]:
        """Return the other gradients of tokens that began to be wrong with this one."""
        origin = self.origins.get(BACKWARD)
        if self.search is None or origin is None or origin.tensor.key != tensor.key:
            return ()
        beside = [origin.tensor for origin in self.search.beside.get(BACKWARD, ())]
        return [other for other in beside if other.expected.ndim >= 3]

    def comes_from_loss(self, origin: Origin) -> bool:
        """Return whether what a loss passes back to the model is wrong: no gradient was right before it.

        Logits have a gradient of the lm loss alone.
        """
        is_first = self.search is not None and not self.search.num_right[BACKWARD]
        return origin.direction == BACKWARD and origin.end == "output" and not origin.culprit and is_first

    def sources_of(self, tensors: Sequence[WrongTensor]) -> list[Source]:
        """Return the integers of the run that a factor of these tensors may come from."""
        if any(tensor.quantity in _OF_THE_RUN for tensor in tensors):
            return list(self.axes.sources)
        return self.axes.sources_of(*map(self._name, tensors))

    def groups_of(self, tensor: WrongTensor) -> Groups:
        """Return the groups of the axes that have to do with a tensor."""
        return self.axes.groups if tensor.quantity in _OF_THE_RUN else self.axes.groups_of(self._name(tensor))

    def _name(self, tensor: WrongTensor) -> str:
        """Return the name of a tensor for look-ups of axes: that of its module, if it was read in a module."""
        origin = self.origin_of(tensor)
        return tensor.name if origin is None else origin.culprit

    def of_quantity(self, *quantities: Quantity) -> list[WrongTensor]:
        """Return the wrong tensors of some quantities, in the order in which these are given."""
        return [
            tensor
            for quantity in quantities
            for tensor in self.tensors.values()
            if tensor.quantity is quantity
        ]
