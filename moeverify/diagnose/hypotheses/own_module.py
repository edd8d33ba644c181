"""Hypothesis: a user's own module, replayed on right inputs with one mistake, computes what ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeverify.diagnose.factors import find_factor
from moeverify.diagnose.first_divergence import Origin
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.rounding import is_representable
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.own.search import Found
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.factor import Factor
from moeverify.results.observation import Replay
from moeverify.results.own_module import Mistake, Mistaken
from moeverify.results.trial import Reason

_SUMS = ("all_reduce", "reduce_scatter")
COUNTED = ("times", "added", "operand-times", "input-gradient", "operand-gradient")


class OwnModuleHypothesis(Hypothesis):
    """The mistakes of `moeverify.diagnose.own`, made one at a time where one device runs the module again.

    It is asked of modules that the reference model does not have, whose formulas nobody has written down.
    """

    name = "own_module"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def applies(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> bool:
        """Return whether the tensor is of a module of a user's own that can be asked for."""
        origin = inputs.origin_of(tensor) if super().applies(tensor, inputs) else None
        return origin is not None and inputs.own(origin) is not None

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Search the mistakes of the culprit."""
        (tensor,) = tensors
        origin = inputs.origin_of(tensor)
        # The hypothesis of one factor asks too, and so does the log of trials.
        if id(tensor) not in inputs.searched_own:
            inputs.searched_own[id(tensor)] = _search(tensor, origin, inputs)
        found = inputs.searched_own[id(tensor)]
        if found is None or origin is None:
            return self.untried(Reason.NOT_COMPARABLE)
        name = origin.culprit
        # Where bfloat16 can hold all that ranks have, that is what is known, and `rounding` says it.
        is_rounded = all(map(_is_rounded_input, found.mistakes)) and is_representable(tensor, torch.bfloat16)
        if not found.mistakes or is_rounded:
            return self.refuse(Replay(formula=name, num_tried=found.num_tried, is_own=True))
        mistakes = tuple(_name_number(each, origin, inputs) for each in found.mistakes)
        operation = Mistaken(module=found.replayed, mistakes=mistakes, ranks=found.ranks, tokens=found.tokens)
        cause = Cause.FORWARD if tensor.quantity is Quantity.OUTPUT else Cause.BACKWARD
        explanation = explain_by(cause, operation, tensors, inputs, residual=found.residual)
        seen = Replay(formula=name, num_tried=found.num_tried, is_own=True, residual=found.residual)
        return self.accept(explanation, seen)


def _is_rounded_input(mistake: Mistake) -> bool:
    return mistake.part == "input" and mistake.way == "bfloat16"


def _search(tensor: WrongTensor, origin: Origin | None, inputs: DiagnosisInputs) -> Found | None:
    own = inputs.own(origin) if origin is not None else None
    if own is None or origin is None or inputs.search is None:
        return None
    try:
        return own.find(origin, tensor, inputs.search.bound)
    except Exception:  # a user's module that cannot be called again costs its own cause alone, and no other
        return None


def _name_number(mistake: Mistake, origin: Origin, inputs: DiagnosisInputs) -> Mistake:
    """Return a mistake with the axis over which ranks sum what counts so often, where there is one."""
    if mistake.way not in COUNTED or mistake.number is None:
        return mistake
    value = mistake.number + 1.0 if mistake.way == "added" else mistake.number
    factor = _name_multiple(value, origin, inputs)
    return mistake if factor is None else mistake.model_copy(update={"factor": factor})


def _name_multiple(value: float, origin: Origin, inputs: DiagnosisInputs) -> Factor | None:
    """Return a number with the axes of that size over which ranks sum what is inside of the module; None without any.

    What each rank adds before a sum counts once for each of them.
    """
    module = origin.culprit
    factor = find_factor(value, inputs.axes.sources_of(module), counts=inputs.axes.counts_of(module))
    rank = origin.ranks[0] if origin.ranks else 0
    summed = {
        each.axis
        for each in inputs.issued(module, rank).collectives
        if each.direction == origin.direction and any(name in each.op for name in _SUMS)
    }
    kept = tuple(
        each for each in factor.equals if len(each.times) == 1 and not each.over and each.times[0] in summed
    )
    return Factor(value=value, equals=kept) if kept else None


HYPOTHESIS = OwnModuleHypothesis()
