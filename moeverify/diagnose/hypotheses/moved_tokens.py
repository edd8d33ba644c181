"""Hypothesis: tokens of what a module puts out, or of its gradient, have the values of others, or none, or twice."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, explain_by
from moeverify.diagnose.inputs import DiagnosisInputs
from moeverify.diagnose.layouts.token_places import find_places
from moeverify.diagnose.layouts.token_sources import find_offset, find_rank_sources, find_sources, list_runs
from moeverify.diagnose.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.explanation import Quantity
from moeverify.results.layout import TokenValues
from moeverify.results.observation import WrongElements
from moeverify.results.trial import Reason

_MOST_RUNS = 4


class MovedTokens(Hypothesis):
    """Every wrong token equals some token of the golden, is zero, counts twice, or has another one added.

    If several modules take a gradient, that of any of them may show this: a module that multiplies it with numbers of
    its own tokens has no gradients of other tokens.
    """

    name = "moved_tokens"
    quantities = frozenset({Quantity.OUTPUT, Quantity.MODULE_GRADIENT})

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look for the source of each token."""
        (tensor,) = tensors
        if tensor.expected.ndim < 3:
            return self.untried(Reason.NOT_COMPARABLE)
        outcome = self._match(tensor, inputs)
        for other in inputs.list_beside(tensor):
            if outcome.explanation is not None:
                break
            found = self._match(other, inputs)
            outcome = outcome if found.explanation is None else found
        return outcome

    def _match(self, tensor: WrongTensor, inputs: DiagnosisInputs) -> Outcome:
        found = find_sources(tensor)
        if found is None:
            return self.refuse()
        way, tokens = found
        if inputs.valid is not None and not any(
            bool(inputs.valid.flatten()[each.tokens[each.wrong]].any()) for each in tokens
        ):
            return self.refuse()  # of padding another hypothesis says more
        length = tensor.expected.shape[1]
        num_wrong = sum(int(each.wrong.sum()) for each in tokens)
        runs = list_runs(tokens, length) if way in ("moved", "added") else []
        operation = TokenValues(
            way=way,
            num_tokens=num_wrong,
            places=find_places(tokens, length),
            offset=find_offset(tokens, tensor.expected.flatten(2).flatten(0, 1)) if runs else None,
            of_ranks=find_rank_sources(tokens) if way == "moved" else (),
            runs=tuple(runs[:_MOST_RUNS]),
            num_runs=len(runs),
        )
        seen = WrongElements(num_wrong=num_wrong, num_elements=sum(each.wrong.numel() for each in tokens))
        is_forward = tensor.quantity is Quantity.OUTPUT
        lost = Cause.FORWARD if is_forward else Cause.BACKWARD
        cause = Cause.PERMUTATION if way == "moved" else lost
        return self.accept(explain_by(cause, operation, (tensor,), inputs), seen)


HYPOTHESIS = MovedTokens()
