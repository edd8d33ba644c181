"""The balance loss counts a choice of experts other than the one used for dispatch."""

from __future__ import annotations

from moeverify.faults.fault import Expected, Fault
from moeverify.faults.patch import Original, Patch
from moeverify.faults.setting import make_case
from moeverify.results.benchmark import At
from moeverify.results.cause import Cause


def inject(patch: Patch) -> None:
    """Count the plain top-k of the scores in the balance loss, without groups and selection bias."""
    from torch import Tensor

    from moeverify.model.router import Router, Routing, summarize

    @patch.wrap(Router.forward)
    def count_plain(
        original: Original[Routing], self: Router, x: Tensor, valid: Tensor | None = None
    ) -> Routing:
        routing = original(self, x, valid)
        logits = self.compute_logits(x)
        scores = logits.sigmoid()
        plain = scores.topk(self.spec.top_k, dim=-1).indices
        shares = scores / scores.sum(dim=-1, keepdim=True)
        assert valid is not None
        return routing._replace(stats=summarize(logits, shares, plain, valid))


FAULT = Fault(
    number="C11",
    title="the balance loss follows another choice of experts",
    source="NVIDIA/Megatron-LM !3279 (cfe7b066c0)",
    mechanism=(
        "expert fractions come from one of two choices: the plain top-k of the scores, or what groups "
        "and bias leave"
    ),
    trigger="groups or a selection bias",
    case=make_case("c11", dp_shard=2),
    expected=Expected(
        where=(
            At(term="balance"),
            At(name="balance"),
            At(name="_balance"),
        ),
        causes=(Cause.FORWARD,),
    ),
    inject=inject,
    notes="mirrored: upstream took the dispatched choice where the plain one was wanted",
)
