"""Hypothesis: the balance or z losses of some layers are weighted differently or lost."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.explain.fitting.fit import Column
from moeverify.explain.fitting.hypotheses.linear_fit import LinearFit, knows
from moeverify.explain.fitting.inputs import DiagnosisInputs
from moeverify.explain.fitting.wrong_tensor import WrongTensor
from moeverify.results.cause import Cause
from moeverify.results.part import Part


class RouterTerms(LinearFit):
    """One coefficient for the lm loss, and one for the balance and z loss of each router.

    Early layers also receive the losses of later ones through the residual stream. A stage that loses its
    own losses therefore leaves gradients that are no sum of whole terms.
    """

    name = "router_terms"
    generalizes = ("detached", "one_factor", "loss_terms")
    cause = Cause.TERM_SCALE

    def columns(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> list[Column]:
        """Return the lm loss and both losses of each router; empty with one router, as in `loss_terms`."""
        components = inputs.components() if inputs.components is not None else None
        if components is None or not knows(components, tensors):
            return []
        split = components.by_router()
        if len(split) <= len(("balance", "z")):
            return []
        lm: Column = (Part(term="lm"), lambda name: components.term("lm", name))
        return [
            lm,
            *(
                (Part(term=term, router=router), lambda name, vector=vector: vector[name])
                for (term, router), vector in split.items()
            ),
        ]


HYPOTHESIS = RouterTerms()
