"""The subject of a sentence about an explanation: `12 expert gradients`, `the output of layers.0`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeverify.results.explanation import Quantity, Subject

MODEL = "the model"

# (singular, plural)
_NOUNS: Mapping[Quantity, tuple[str, str]] = {
    Quantity.EXPERT_CHOICE: ("expert choice", "expert choices"),
    Quantity.LOSS: ("loss", "losses"),
    Quantity.GRADIENT: ("gradient", "gradients"),
    Quantity.GRADIENT_NORM: ("gradient norm", "gradient norms"),
    Quantity.CLIP_COEFFICIENT: ("clip coefficient", "clip coefficients"),
    Quantity.UPDATE: ("update", "updates"),
    Quantity.OPTIMIZER_STATE: ("optimizer state", "optimizer states"),
    Quantity.BUFFER: ("buffer", "buffers"),
    Quantity.LOADED: ("loaded tensor", "loaded tensors"),
    Quantity.TENSOR: ("tensor", "tensors"),
}
# Nouns that are plural even for one tensor.
_PLURALS: Mapping[Quantity, str] = {
    Quantity.INITIAL_VALUE: "initial values",
    Quantity.ROUTING_WEIGHT: "routing weights",
    Quantity.ROUTING_COUNT: "routing counts",
}


@dataclass(frozen=True)
class Phrase:
    """The subject of a sentence and its grammatical number."""

    text: str
    is_plural: bool = False

    def __str__(self) -> str:
        """Return the subject."""
        return self.text

    def pick(self, one: str, several: str) -> str:
        """Return the word that agrees with the subject's number."""
        return several if self.is_plural else one

    @property
    def be(self) -> str:
        """Return `is` or `are`."""
        return self.pick("is", "are")


def name_culprit(subject: Subject) -> str:
    """Return the module where a divergence began, or the loss if its gradient is wrong from the start."""
    if subject.quantity in (Quantity.MODULE_GRADIENT, Quantity.LOSS) and subject.tensors:
        return f"the {' and '.join(subject.tensors)} loss"
    return subject.module or MODEL


def name_subject(subject: Subject) -> Phrase:
    """Return the wrong quantity as the subject of a sentence."""
    quantity = subject.quantity
    if quantity is Quantity.OUTPUT:
        return Phrase(
            f"the input of {subject.inner}" if subject.inner else f"the output of {subject.module or MODEL}"
        )
    if quantity is Quantity.MODULE_GRADIENT:
        if subject.inner:
            return Phrase(f"the gradient of the output of {subject.inner}")
        return Phrase(f"the gradient that {name_culprit(subject)} passes back")
    if quantity is Quantity.LOSS and subject.tensors:
        return Phrase(f"the {' and '.join(subject.tensors)} loss")
    return _name_tensors(subject, len(subject.tensors))


def _name_tensors(subject: Subject, count: int) -> Phrase:
    """Return tensors in words: `the gradient`, `12 expert gradients`, `the initial values of 3 tensors`."""
    family = f"{subject.family} " if subject.family else ""
    if subject.quantity in _PLURALS:
        of = f" of {count} {family}tensors" if count > 1 else ""
        return Phrase(f"the {_PLURALS[subject.quantity]}{of}", is_plural=True)
    one, several = _NOUNS[subject.quantity]
    if count < 2:
        return Phrase(f"the {one}")
    if subject.quantity is Quantity.LOADED:
        return Phrase(f"{count} loaded {family}tensors", is_plural=True)
    return Phrase(f"{count} {family}{several}", is_plural=True)
