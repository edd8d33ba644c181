"""Hypothesis: tokens have the values of other tokens, in what a module puts out or in its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.hypotheses.permutation import MOST_MOVES
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.slices import count_matches, match_slices
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.observation import MatchingSlices
from moeverify.results.operation import Moved
from moeverify.results.trial import Reason


class MovedTokens(Hypothesis):
    """Every token equals some token of the golden, over rows and positions together.

    Of a gradient that several modules take, that of any of them may tell so: what one makes of it with numbers of its
    own tokens is no gradient of others. Shapes: (rows, positions, ...) is compared as (rows * positions, ...).
    """

    name = "moved_tokens"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Match tokens."""
        (tensor,) = tensors
        if tensor.expected.ndim < 3:
            return self.untried(Reason.NOT_COMPARABLE)
        outcome = self._match(tensor, tensors, inputs)
        for other in _list_beside(tensor, inputs):
            if outcome.explanation is not None:
                break
            found = self._match(other, (other,), inputs)
            outcome = outcome if found.explanation is None else found
        return outcome

    def _match(self, tensor: WrongTensor, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        width = tensor.expected.shape[2:].numel()
        expected, actual = (each.reshape(-1, width) for each in (tensor.expected, tensor.whole))
        found = count_matches(expected, actual, 0)
        if found is None:
            return self.untried(Reason.NOT_COMPARABLE)
        seen = MatchingSlices(dim=None, num_matching=found, num_slices=len(actual))
        source = match_slices(expected, actual, 0)
        moves = [(to, origin) for to, origin in enumerate(source or []) if to != origin]
        if not moves:
            return self.refuse(seen)
        operation = Moved(unit="token", moves=tuple(moves[:MOST_MOVES]), num_moves=len(moves))
        return self.accept(explain_by(Cause.PERMUTATION, operation, tensors, inputs), seen)


def _list_beside(tensor: WrongTensor, inputs: DiagnosisInputs) -> Sequence[WrongTensor]:
    """Return the other gradients that began to be wrong with this one."""
    search, direction = inputs.search, "backward"
    if (
        search is None
        or direction not in search.origins
        or search.origins[direction].tensor.key != tensor.key
    ):
        return ()
    beside = [origin.tensor for origin in search.beside.get(direction, ())]
    return [other for other in beside if other.expected.ndim >= 3]


HYPOTHESIS = MovedTokens()
