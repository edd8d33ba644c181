"""Hypothesis: on right logits, each token has the very loss of its formula with a part or two otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from moeverify.diagnose.cross_entropy.formula import CrossEntropyFormula, CrossEntropyGradientFormula
from moeverify.diagnose.cross_entropy.search import Found, find_variant
from moeverify.diagnose.hypotheses.base import Hypothesis, Outcome, Scope
from moeverify.diagnose.inputs import LM, DiagnosisInputs
from moeverify.diagnose.wrong_tensor import RankShard, WrongTensor
from moeverify.layout.region import Region
from moeverify.results.cause import Cause
from moeverify.results.checks import Kind
from moeverify.results.explanation import Explanation, Quantity, Subject
from moeverify.results.observation import Replay
from moeverify.results.operation import Varied
from moeverify.results.trial import Reason
from moeverify.train.module_taps import BACKWARD, FORWARD

_NAME = "cross-entropy"


class LossFormula(Hypothesis):
    """The variants of the cross entropy, on the golden's logits and labels.

    Where gradients are wrong as well, what the loss passes back to the logits must be that of the same variant.
    """

    name = "loss_formula"
    quantities = frozenset({Quantity.GRADIENT, Quantity.LOSS})

    own_scopes = (Scope.TOGETHER,)
    """All wrong gradients, or all wrong losses, have this one cause."""

    def test(self, tensors: Sequence[WrongTensor], inputs: DiagnosisInputs) -> Outcome:
        """Look at the loss of each token."""
        losses = [each for each in inputs.of_quantity(Quantity.LOSS) if each.key[1] == Kind.TOKEN_LOSS]
        if len(losses) != 1 or inputs.search is None or FORWARD in inputs.origins:
            return self.untried(Reason.LOSSES_MATCH if not losses else Reason.NOT_COMPARABLE)
        formula, bound = inputs.cross_entropy(), inputs.search.bound
        found = None if formula is None else find_variant(formula, _widen(losses[0]), bound)
        if formula is None or found is None:
            return self.untried(Reason.NOT_COMPARABLE)
        variants = found.variants
        if tensors[0].quantity is Quantity.GRADIENT:
            passed = _explain_passed_back(formula, inputs)
            variants = tuple(each for each in variants if passed is not None and each in passed.variants)
        seen = Replay(formula=_NAME, num_tried=found.num_tried, residual=found.residual)
        if not variants:
            return self.refuse(Replay(formula=_NAME, num_tried=found.num_tried))
        is_reported = tensors[0].quantity is Quantity.LOSS
        explanation = Explanation(
            cause=Cause.METRIC if is_reported else Cause.FORWARD,
            subject=Subject(quantity=Quantity.LOSS, tensors=(LM,)),
            operation=Varied(formula=_NAME, variants=variants, ranks=found.ranks, tokens=found.tokens),
            residual=found.residual,
        )
        return self.accept(explanation, seen)


def _explain_passed_back(formula: CrossEntropyFormula, inputs: DiagnosisInputs) -> Found | None:
    """Return the variants of what the loss passes back; None where no gradient of logits is wrong first."""
    origin = inputs.origins.get(BACKWARD)
    if origin is None or not inputs.comes_from_loss(origin) or inputs.search is None:
        return None
    if origin.tensor.expected.shape != formula.logits.shape:
        return None
    return find_variant(CrossEntropyGradientFormula(formula), origin.tensor, inputs.search.bound)


def _widen(loss: WrongTensor) -> WrongTensor:
    """Return losses (B, S) as (B, S, 1)."""
    shards = []
    for shard in loss.shards:
        dims = (*shard.region.dims, range(1))
        region = Region.box((*shard.region.shape, 1), dims)
        local = None if shard.local is None else shard.values().unsqueeze(-1)
        shards.append(RankShard(shard.rank, region, local))
    return WrongTensor(loss.key, loss.expected.unsqueeze(-1), tuple(shards), loss.precision)


HYPOTHESIS = LossFormula()
